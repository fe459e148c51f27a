from stagewright.schedules import create


def orders(**options: object) -> list[str]:
    schedule = create("gpipe", num_ranks=2, num_microbatches=3, **options)
    return [" ".join(map(str, schedule.order(rank))) for rank in range(2)]


def test_first_in_first_out() -> None:
    assert orders() == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_last_in_first_out() -> None:
    assert orders(last_first=True) == ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]
