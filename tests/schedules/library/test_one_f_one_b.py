from stagewright.schedules import create


def orders(name: str, num_ranks: int, num_microbatches: int, **options: object) -> list[str]:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return [" ".join(map(str, schedule.order(rank))) for rank in range(num_ranks)]


def test_fewer_microbatches_than_warmup() -> None:
    assert orders("1f1b", 3, 1) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_deep_warmup() -> None:
    """DAPPLE's policy B: twice as many forwards in advance."""
    assert orders("dapple", 3, 6, deep_warmup=True) == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5",
    ]
