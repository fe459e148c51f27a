"""Forward and backward of a microbatch on a stage use the same weight version, one that exists all the while."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import BACKWARD, STEP, Table


def check_versions(program: Program) -> None:
    """Refuse versions read before they are made or after they are overwritten, and backwards that use another one."""
    table = program.table
    newest = newest_versions(table)
    used = versions_used(table, newest)
    _check_existence(program, newest)
    for forward, backward, weight in zip(table.forward, table.input_gradient, table.weight_gradient):
        version = used[forward]
        if version != used[backward] or version != used[weight]:
            row = backward if version != used[backward] else weight
            message = (
                f"{at_row(program, row)} uses weight version {used[row]}, but its forward, {at_row(program, forward)}, "
                f"used version {version}"
            )
            raise refusal(program, "version mismatch", message, row, forward)


def newest_versions(table: Table) -> list[int]:
    """For each computation the newest version of its stage on its rank when it runs."""
    newest = [0] * len(table)
    for rank in range(table.num_ranks):
        current = [0] * table.num_stages
        first, end = table.first_row[rank], table.first_row[rank + 1]
        for row, operation, stage in zip(range(first, end), table.operation[first:end], table.stage[first:end]):
            if operation <= BACKWARD:
                newest[row] = current[stage]
            elif operation == STEP:
                current[stage] = table.version[row]
    return newest


def versions_used(table: Table, newest: list[int]) -> list[int]:
    """For each computation the version that it reads: the one that it names, or else the newest."""
    return [version if version >= 0 else current for version, current in zip(table.version, newest)]


def _check_existence(program: Program, newest: list[int]) -> None:
    table = program.table
    for row, (operation, version) in enumerate(zip(table.operation, table.version)):
        if version < 0 or operation > BACKWARD:
            continue
        if version > newest[row]:
            message = f"{at_row(program, row)} reads weight version {version}, while the newest is {newest[row]}"
            raise refusal(program, "version not made", message, row)
        kept = program.updates.num_versions[table.rank[row]]
        if version <= newest[row] - kept:
            message = (
                f"{at_row(program, row)} reads weight version {version}, which was overwritten: the newest is "
                f"{newest[row]}, and rank {table.rank[row]} keeps {kept}"
            )
            raise refusal(program, "version overwritten", message, row)
