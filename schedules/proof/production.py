"""Each instruction's inputs exist on its rank when it runs: they stand before it in its rank's stream."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal


def check_production(program: Program, *, communicates: bool = True) -> None:
    """Refuse what is used before it is made or received.

    Args:
        program: passed the completeness rule.
        communicates: whether what crosses ranks must be received; in a program still without communication,
            only what stays on a rank is looked at.
    """
    table = program.table
    width, last = table.num_microbatches, (table.num_stages - 1) * table.num_microbatches
    rank, forwards, backwards = table.rank, table.forward, table.input_gradient
    for key, (forward, backward, weight) in enumerate(zip(forwards, backwards, table.weight_gradient)):
        _need(program, forward, backward)
        if weight != backward:
            _need(program, backward, weight)
        if table.send_activation[key] >= 0:
            _need(program, forward, table.send_activation[key])
        if table.send_gradient[key] >= 0:
            _need(program, backward, table.send_gradient[key])
        if key >= width:
            if rank[forwards[key - width]] == rank[forward]:
                _need(program, forwards[key - width], forward)
            elif communicates:
                _need(program, table.receive_activation[key], forward)
        if key < last:
            if rank[backwards[key + width]] == rank[backward]:
                _need(program, backwards[key + width], backward)
            elif communicates:
                _need(program, table.receive_gradient[key], backward)


def _need(program: Program, made: int, used: int) -> None:
    """Row ``used`` needs what row ``made`` makes on the same rank."""
    if made < 0:
        raise refusal(program, "use before production", f"the input of {at_row(program, used)} is never received", used)
    if made > used:
        message = f"{at_row(program, used)} runs before what it needs, {at_row(program, made)}"
        raise refusal(program, "use before production", message, used, made)
    if made == used - 1 and made in program.table.fused:
        message = f"{at_row(program, used)} fuses a backward with the forward that it needs"
        raise refusal(program, "use before production", message, used)
