from stagewright.schedules import create, simulate


def test_one_rank_trains_plainly() -> None:
    program = create("none", num_ranks=1, num_microbatches=2).program()
    assert program.to_csv() == "0F0,0B0,0F1,0B1,0STEP@1\n"
    assert simulate(program).bubble_fraction == 0


def test_several_ranks_take_turns() -> None:
    timeline = simulate(create("naive", num_ranks=4, num_microbatches=8).program())
    assert timeline.bubble_fraction == 3 / 4
    assert timeline.peak_stash == (1, 1, 1, 1)
