"""Each instruction's inputs exist on its rank when it runs."""

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row


def check_production(program: Program) -> None:
    """Refuse what is used before it is made or received."""
    table = program.table
    width, last = table.num_microbatches, (table.num_stages - 1) * table.num_microbatches
    rank = table.rank
    for key, (forward, backward, weight) in enumerate(zip(table.forward, table.input_gradient, table.weight_gradient)):
        _need(program, forward, backward)
        if weight != backward:
            _need(program, backward, weight)
        if table.send_activation[key] >= 0:
            _need(program, forward, table.send_activation[key])
        if table.send_gradient[key] >= 0:
            _need(program, backward, table.send_gradient[key])
        if key >= width:
            here = rank[table.forward[key - width]] == rank[forward]
            _need(program, table.forward[key - width] if here else table.receive_activation[key], forward)
        if key < last:
            here = rank[table.input_gradient[key + width]] == rank[backward]
            _need(program, table.input_gradient[key + width] if here else table.receive_gradient[key], backward)


def _need(program: Program, made: int, used: int) -> None:
    """Row ``used`` needs what row ``made`` makes on the same rank."""
    if made < 0:
        raise ScheduleError(f"the input of {at_row(program, used)} is never received", "use before production")
    if made > used or (made == used - 1 and made in program.table.fused):
        raise ScheduleError(f"{at_row(program, used)} runs before {at_row(program, made)}", "use before production")
