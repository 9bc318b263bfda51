"""Hints: the names of every framework's generations, markers and trackers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.lifetimes import (
    NUMBER_MAX,
    Layout,
    is_marker,
    is_tracker,
    marker,
    markers_of,
    recognise,
    tracked,
    unfinished_marker,
    without_temporary,
)
from retainzfs.lifetimes.markers import best

pytestmark = pytest.mark.pure

NAMES = st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name)

DIRECTORY_NAMES = [
    (b"step-1000", Layout.TORCHTITAN, 1000, b"step-"),
    (b"iter_0001000", Layout.MEGATRON, 1000, b"iter_"),
    (b"iter_12345678", Layout.MEGATRON, 12345678, b"iter_"),
    (b"checkpoint-500", Layout.HUGGINGFACE, 500, b"checkpoint-"),
    (b"global_step42", Layout.DEEPSPEED, 42, b"global_step"),
    (b"checkpoint_7", Layout.NUMBERED, 7, b"checkpoint_"),
    (b"step_100", Layout.NUMBERED, 100, b"step_"),
    (b"ckpt-0", Layout.NUMBERED, 0, b"ckpt-"),
    (b"epoch3", Layout.NUMBERED, 3, b"epoch"),
    (b"global_step_5", Layout.NUMBERED, 5, b"global_step_"),
    (b"ep4-ba1000", Layout.COMPOSER, 1000, b"ep-ba"),
    (
        b"gpt--val_loss=0.23-step=900-consumed_samples=8000.0",
        Layout.NEMO,
        900,
        b"gpt--val_loss=-step=-consumed_samples=",
    ),
]
FILE_NAMES = [
    (b"epoch=3-step=1000.ckpt", Layout.LIGHTNING, 1000, b"epoch=-step=.ckpt"),
    (b"epoch=3-step=1000-v2.ckpt", Layout.LIGHTNING, 1000, b"epoch=-step=.ckpt"),
    (b"epoch=3-step=9-val_loss=0.23.ckpt", Layout.LIGHTNING, 9, b"epoch=-step=-val_loss=.ckpt"),
    (b"epoch=02-val_loss=0.23.ckpt", Layout.LIGHTNING, 2, b"epoch=-val_loss=.ckpt"),
    (b"my run-epoch=1-step=5.ckpt", Layout.LIGHTNING, 5, b"my run-epoch=-step=.ckpt"),
    ("é-step=5.ckpt".encode(), Layout.LIGHTNING, 5, "é-step=.ckpt".encode()),
    (b"ep4-ba1000-rank3.pt", Layout.COMPOSER, 1000, b"ep-ba-rank3.pt"),
    (b"ep4-ba1000.pt", Layout.COMPOSER, 1000, b"ep-ba.pt"),
    (b"ckpt-12.index", Layout.TENSORFLOW, 12, b"ckpt-.index"),
    (
        b"model.ckpt-12.data-00000-of-00002",
        Layout.TENSORFLOW,
        12,
        b"model.ckpt-.data-00000-of-00002",
    ),
    (b"model-5.pt", Layout.PLAIN, 5, b"model-.pt"),
    (b"opt-5.pt", Layout.PLAIN, 5, b"opt-.pt"),
    (b"step-1000.pt", Layout.PLAIN, 1000, b"step-.pt"),
    (b"my model_007.safetensors", Layout.PLAIN, 7, b"my model_.safetensors"),
    (b"step-5-rank0.pt", Layout.PLAIN, 5, b"step--rank0.pt"),
    (b"model_5_rank_12.pt", Layout.PLAIN, 5, b"model__rank_12.pt"),
    (b"ckpt-100.shard-3-of-8.safetensors", Layout.PLAIN, 100, b"ckpt-.shard-3-of-8.safetensors"),
    (b"rank0-step5.pt", Layout.PLAIN, 5, b"rank0-step.pt"),
    (b"rank_0_step_5.pt", Layout.PLAIN, 5, b"rank_0_step_.pt"),
    (b"checkpoint-5.pth.tar", Layout.PLAIN, 5, b"checkpoint-.pth.tar"),
    (b"ckpt_9.tar", Layout.PLAIN, 9, b"ckpt_.tar"),
    (b"ckpt1000.PT", Layout.PLAIN, 1000, b"ckpt.PT"),
    (b"0050000.pt", Layout.PLAIN, 50000, b".pt"),
    (b"weights_3.npz", Layout.PLAIN, 3, b"weights_.npz"),
    (b"state_4.msgpack", Layout.PLAIN, 4, b"state_.msgpack"),
    (b"ckpt-%d.pt" % NUMBER_MAX, Layout.PLAIN, NUMBER_MAX, b"ckpt-.pt"),
]


@pytest.mark.parametrize(("name", "layout", "number", "stem"), DIRECTORY_NAMES + FILE_NAMES)
def test_every_frameworks_name(name: bytes, layout: Layout, number: int, stem: bytes) -> None:
    match = recognise([b"run1", name])
    assert match is not None
    assert (match.depth, match.layout, match.number) == (1, layout, number)
    assert (match.stem, match.final, match.temporary) == (stem, name, False)
    assert match.is_directory == ((name, layout, number, stem) in DIRECTORY_NAMES)
    below = recognise([b"run1", name, b"model-7.pt"])
    assert below is not None
    assert (below.depth, below.number, below.is_directory) == (1, number, True)


@pytest.mark.parametrize(
    ("name", "layout", "number", "final"),
    [
        (b"tmp-checkpoint-500", Layout.HUGGINGFACE, 500, b"checkpoint-500"),
        (b"5.orbax-checkpoint-tmp", Layout.ORBAX, 5, b"5"),
        (b"5.orbax-checkpoint-tmp-1690000000", Layout.ORBAX, 5, b"5"),
        (b"run_a_5.orbax-checkpoint-tmp", Layout.ORBAX, 5, b"run_a_5"),
        (b"step-5.tmp", Layout.TORCHTITAN, 5, b"step-5"),
        (b".step-5.pt.tmp.4711", Layout.PLAIN, 5, b"step-5.pt"),
        (b"model-5.safetensors.incomplete", Layout.PLAIN, 5, b"model-5.safetensors"),
        (b".model-5.pt.Xa3b9Q", Layout.PLAIN, 5, b"model-5.pt"),
        (b"ckpt-3_temp", Layout.TENSORFLOW, 3, b"ckpt-3"),
        (b"model.ckpt-3_temp_0badc0de", Layout.TENSORFLOW, 3, b"model.ckpt-3"),
    ],
)
def test_temporary_names(name: bytes, layout: Layout, number: int, final: bytes) -> None:
    match = recognise([name])
    assert match is not None
    assert match.temporary
    assert (match.layout, match.number, match.final) == (layout, number, final)
    assert without_temporary(name) == (final, True)


def test_temporary_name_has_the_stem_of_the_final_one() -> None:
    temporary, final = recognise([b".model-5.pt.tmp"]), recognise([b"model-6.pt"])
    assert temporary is not None
    assert final is not None
    assert temporary.stem == final.stem


@pytest.mark.parametrize(
    "name",
    [
        b"latest_checkpointed_iteration.txt",
        b"latest",
        b"checkpoint",
        b"release",
        b"last.ckpt",
        b"last-v3.ckpt",
        b"last.ckpt.tmp",
        b"latest-rank0.pt",
        b"checkpoint_last.pt",
        b"model_best.pth.tar",
        b"gpt--step=900-last",
        b"gpt--step=900-last.ckpt",
        b"epoch=3-step=1000-unfinished",
        b"train-5.log",
        b"step-5.bak",
        b"model-5.pt.bak",
    ],
)
def test_trackers_are_no_generations(name: bytes) -> None:
    assert recognise([name]) is None
    assert is_tracker(without_temporary(name)[0])


@pytest.mark.parametrize(
    "name",
    [
        b"model-00001-of-00005.safetensors",
        b"pytorch_model-00001-of-00002.bin",
        b"rng_state_0.pth",
        b"random_states_0.pkl",
        b"zero_pp_rank_0_mp_rank_00_optim_states.pt",
        b"rank_3.pt",
        b"rank3.pt",
        b"data-5.npz",
        b"data-5-rank0.npz",
        b"model-rank0.pt",
        b"model_rank_7.pt",
        b"model-00001-of-00005-rank3.safetensors",
        b"step-5-rankle0.pt",
        b"train-000123.tar",
        b"resnet50.pt",
        b"model_v2.pt",
        b"model-0.23.ckpt",
        b"__0_0.distcp",
        b"step-5.txt",
        b"epoch=3-step=1000.txt",
        b"step=10.5.ckpt",
        b"lr=0.1-epoch=3",
        b"1.npz",
        b"7",
        b"run_3",
        b"foo.orbax-checkpoint-tmp",
        b"step-",
        b"step-5a",
        b"step--5",
        b"-5",
        b".pt",
        b"step-%d" % (NUMBER_MAX + 1),
        b"step-" + b"9" * 250,
        b"step-" + b"9" * 5000,
        "step-٣".encode(),
    ],
)
def test_other_names_are_no_generations(name: bytes) -> None:
    assert recognise([name]) is None


def test_outermost_match_wins() -> None:
    match = recognise([b"run", b"checkpoint-200", b"global_step150", b"x.pt"])
    assert match is not None
    assert (match.depth, match.number, match.layout) == (1, 200, Layout.HUGGINGFACE)


def test_trackers_inside_a_generation_belong_to_it() -> None:
    match = recognise([b"checkpoint", b"step-5", b"train.log"])
    assert match is not None
    assert (match.depth, match.number) == (1, 5)


def test_accelerate_is_known_by_its_parent() -> None:
    match = recognise([b"out", b"checkpoints", b"checkpoint_3", b"model.safetensors"])
    assert match is not None
    assert (match.depth, match.layout) == (2, Layout.ACCELERATE)


@given(st.lists(NAMES, max_size=6))
def test_recognise_never_raises_and_stays_in_bounds(components: list[bytes]) -> None:
    match = recognise(components)
    if match is not None:
        assert 0 <= match.depth < len(components)
        assert 0 <= match.number <= NUMBER_MAX
        assert match.final in components[match.depth]


AFFIXES = st.text("-_=.0123456789abektmps ~é", max_size=20).map(str.encode)


@given(
    AFFIXES,
    st.integers(0, NUMBER_MAX),
    st.sampled_from([b"", b".pt", b".ckpt", b".pth.tar", b".tmp"]),
)
def test_names_near_the_known_ones(prefix: bytes, number: int, ending: bytes) -> None:
    match = recognise([prefix + b"%d" % number + ending])
    if match is not None and not prefix[-1:].isdigit() and b"=" not in prefix:
        assert match.number == number


@pytest.mark.parametrize(
    ("names", "series"),
    [
        ([b"step-5-rank0.pt", b"step-6-rank1.pt", b"step-6.pt"], 1),
        ([b"ckpt-1.shard-3-of-8.pth.tar", b"ckpt-2.shard-0-of-8.pth.tar"], 1),
        ([b"model-a-5.pt", b"model-b-5.pt"], 2),
        ([b"model-5.pt", b"optimizer-5.pt"], 2),
    ],
)
def test_the_ranks_of_a_job_are_one_series(names: list[bytes], series: int) -> None:
    matches = [recognise([name]) for name in names]
    assert len({match.series for match in matches if match is not None}) == series
    assert None not in matches


@pytest.mark.parametrize("layout", list(Layout))
def test_markers_are_listed_first(layout: Layout) -> None:
    for name in markers_of(layout):
        example = name.replace(b"*", b"ckpt-5")
        assert marker(layout, example)
        assert is_marker(example)
    assert not marker(layout, b"model.pt")


def test_markers_of_others_do_not_count() -> None:
    assert not marker(Layout.HUGGINGFACE, b".metadata")
    assert not marker(Layout.TORCHTITAN, b".metadata.tmp")
    assert is_marker(b"latest")
    assert not is_marker(b"model-5.pt")


@pytest.mark.parametrize(
    ("name", "content", "target"),
    [
        (b"latest_checkpointed_iteration.txt", b"1000\n", b"iter_0001000"),
        (b"latest_checkpointed_iteration.txt", b"release", b"release"),
        (b"latest_checkpointed_iteration.txt", b"", None),
        (b"latest_checkpointed_iteration.txt", b"\0" * 8, None),
        (b"latest", b"global_step42", b"global_step42"),
        (b"latest", b"../x", None),
        (b"latest", b"x" * 5000, None),
        (b"checkpoint", b'model_checkpoint_path: "ckpt-5"\nall_model...', b"ckpt-5"),
        (b"checkpoint", b'model_checkpoint_path: "/mnt/a/ckpt-5"\n', b"ckpt-5"),
        (b"checkpoint", b"", None),
        (b"other", b"5", None),
    ],
)
def test_tracker_names_the_newest(name: bytes, content: bytes, target: bytes | None) -> None:
    assert tracked(name, content) == target


@given(
    st.sampled_from([b"latest", b"checkpoint", b"latest_checkpointed_iteration.txt"]), st.binary()
)
def test_tracked_never_raises(name: bytes, content: bytes) -> None:
    target = tracked(name, content)
    assert target is None or b"/" not in target


def test_nemo_marks_beside() -> None:
    assert unfinished_marker(b"epoch=3-step=9.ckpt") == b"epoch=3-step=9-unfinished"
    assert is_tracker(unfinished_marker(b"gpt--step=9"))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ('"/data/run/checkpoint-500"', b"checkpoint-500"),
        ('"run/checkpoint-500/"', b"checkpoint-500"),
        ('"r\\u00fcn/checkpoint-5"', b"checkpoint-5"),
        ('"a\\"b"', b'a"b'),
        ("null", None),
        ('""', None),
        ('"/"', None),
        ('"\\ud800"', None),
        ('"cut off', None),
        ("7", None),
    ],
)
def test_trainer_state_names_the_best(value: str, name: bytes | None) -> None:
    text = f'{{\n  "best_metric": 0.5,\n  "best_model_checkpoint": {value},\n  "epoch": 1.0,'
    assert best(text.encode()) == name


@given(st.binary())
def test_best_never_raises(content: bytes) -> None:
    name = best(b'"best_model_checkpoint": "' + content)
    assert name is None or b"/" not in name
