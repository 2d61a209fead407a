"""Whatever is damaged in the newest checkpoint is seen and named, and the one before it is used."""

import json
import os
import pickle
import random
import shutil
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.find import find_named, find_newest
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.drill import Run, check_died, check_resumed, check_same, prepared_config
from tests.checkpoint.folders import seal, write_manifest

pytestmark = pytest.mark.drill

RANKS = 2
SHARDS = [f"shard-{rank:05d}-of-{RANKS:05d}.safetensors" for rank in range(RANKS)]
FILES = [*SHARDS, "state.json", "manifest.json"]
NEWEST = "step-4"
OLDER = "step-3"
OLDEST = "step-2"
KEEP = {"parallel3d__checkpoint__keep": 3, "zero_optimization__stage": 1}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A whole run and its last three checkpoints."""
    config = prepared_config(tmp_path_factory.mktemp("damage"), num_layers=1)
    run = Run(config, "unbroken", (1, 2, 1), **KEEP)
    ended = run.start()
    assert [end.code for end in ended] == [0] * RANKS, ended[0].log
    run.check_whole(tidy=False)
    assert run.complete_steps() == [2, 3, 4]
    names = {path.name for path in (run.checkpoints / NEWEST).iterdir()}
    assert names == {*FILES, "tokenizer"}
    return run


@dataclass(frozen=True)
class Damage:
    """A damage to a copy of the checkpoints, and the step that must be used then."""

    kind: str
    folder: Path
    names: tuple[str, ...]  # the file that each rejection names, or one of several
    step: int | None = 3  # None: no step is used


class Exploit:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Copies:
    """Copies of a run's checkpoints, each damaged in its own way."""

    def __init__(self, checkpoints, root):
        self.checkpoints = checkpoints
        self.root = root
        self.exploited = root / "exploited"
        self.damages = []

    def copy(self):
        """A new copy, of links: nothing in it may be written in place."""
        folder = self.root / f"{len(self.damages)}"
        shutil.copytree(self.checkpoints, folder, copy_function=os.link)
        return folder

    def add(self, kind, names, change, step=3):
        """One more, in which `change(folder)` did its work."""
        folder = self.copy()
        change(folder)
        names = (names,) if isinstance(names, str) else names
        self.damages.append(Damage(kind, folder, names, step))

    def rewritten(self, kind, name, change, sealed=False):
        """One more, in which a file's bytes are changed; `sealed`: the manifest fits them."""

        def rewrite(folder):
            path = folder / NEWEST / name
            data = change(path.read_bytes())
            path.unlink()
            path.write_bytes(data)
            if sealed:
                _resealed(folder / NEWEST)

        self.add(kind, name, rewrite)


def _resealed(folder):
    (folder / "manifest.json").unlink()
    seal(folder, 4)


def _swap(one, other):
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _flipped(position, bit):
    def flip(data):
        data = bytearray(data)
        data[position] ^= 1 << bit
        return bytes(data)

    return flip


def _make_folder(path):
    path.unlink()
    path.mkdir()


def damage_one_shard(copies):
    """Every kind of damage to one shard, as to the files beside it."""
    damage_files(copies, FILES[1:], num_flips=1)


def damage_each_file(copies):
    """Every kind of damage to every file of the newest checkpoint in turn."""
    damage_files(copies, FILES, num_flips=4)


def damage_files(copies, names, num_flips):
    draw = random.Random(0)
    for i, name in enumerate(names):
        size = (copies.checkpoints / NEWEST / name).stat().st_size
        for position in (draw.randrange(size), 0, size - 1, draw.randrange(size))[:num_flips]:
            copies.rewritten("flip", name, _flipped(position, draw.randrange(8)))
        copies.rewritten("truncate", name, lambda data: data[:-1])
        copies.rewritten("truncate", name, lambda data: data[: len(data) // 2])
        copies.rewritten("lengthen", name, lambda data: data + b"\0")
        copies.rewritten("empty", name, lambda data: b"")
        copies.rewritten("zeros", name, lambda data: bytes(len(data)))
        copies.rewritten("pickle", name, lambda data: pickle.dumps(Exploit(copies.exploited)))
        copies.add("delete", name, lambda folder, name=name: (folder / NEWEST / name).unlink())
        copies.add("folder", name, lambda folder, name=name: _make_folder(folder / NEWEST / name))
        old = (copies.checkpoints / OLDER / name).read_bytes()
        copies.rewritten("older", name, lambda data, old=old: old)
        copies.add(
            "swap with the older one's",
            name,
            lambda folder, name=name: _swap(folder / NEWEST / name, folder / OLDER / name),
            step=2,
        )
        for other in names[i + 1 :]:
            copies.add(
                "swap",
                (name, other),
                lambda folder, a=name, b=other: _swap(folder / NEWEST / a, folder / NEWEST / b),
            )


def forge(copies):
    """Checkpoints that mean harm, or nothing, under manifests that fit them."""
    payload = pickle.dumps(Exploit(copies.exploited))
    for name in FILES[:-1]:
        copies.rewritten("sealed pickle", name, lambda data: payload, sealed=True)
        copies.rewritten("sealed nothing", name, lambda data: b"", sealed=True)
    petabytes = struct.pack("<Q", 2**50 + 2**40)
    for claim in (petabytes, struct.pack("<Q", 2**64 - 1)):
        copies.rewritten("petabytes", SHARDS[1], lambda data, c=claim: c + data[8:], sealed=True)
    entry = {"dtype": "F32", "shape": [2**49], "data_offsets": [0, 2**51]}
    header = json.dumps({"head.norm.weight|master|0": entry}).encode()
    huge = struct.pack("<Q", len(header)) + header
    copies.rewritten("petabytes", SHARDS[0], lambda data: huge + bytes(64), sealed=True)
    for step in ("5", '"4"', "-1"):
        copies.rewritten(
            "another step",
            "state.json",
            lambda data, step=step: data.replace(b'"step": 4,', f'"step": {step},'.encode()),
            sealed=True,
        )
    copies.rewritten("no parameters", "state.json", lambda data: b'{"step": 4}', sealed=True)
    for path in (f"../{OLDER}/{SHARDS[0]}", "..", "/etc/passwd", "a/b.safetensors", ".safetensors"):

        def name_it(folder, path=path):
            manifest = folder / NEWEST / "manifest.json"
            content = json.loads(manifest.read_text())
            content["files"][path] = content["files"].pop(SHARDS[0])
            manifest.unlink()
            write_manifest(folder / NEWEST, content | {"digest": "0" * 32})

        copies.add("path", ("manifest.json", path), name_it)


def find_in_all(rank, folders):
    """Return for each folder the step that is resumed, the rejections, and what naming one says.

    A step is named by its number and by its folder in turn.
    """
    mesh = Mesh(dp=RANKS)
    answers = []
    for number, folder in enumerate(folders):
        checkpoint, rejected = find_newest([DiskPlace(mesh, folder)])
        step = checkpoint and checkpoint.step
        resume = (4, str(folder / NEWEST))[number % 2]
        try:
            message = f"used step {find_named(folder, resume, mesh).step}"
        except CheckpointError as error:
            message = str(error)
        answers.append((step, rejected, message))
    return answers


def check_all(copies):
    """Every damage is seen, the file is named, and the older checkpoint used; how many of each."""
    pickle.loads(pickle.dumps(Exploit(copies.exploited)))
    copies.exploited.rmdir()  # it works, where it is read
    ranks = run_locally(find_in_all, RANKS, [damage.folder for damage in copies.damages])
    assert ranks[0] == ranks[1]
    detected = Counter()
    for damage, (step, rejected, message) in zip(copies.damages, ranks[0], strict=True):
        assert step == damage.step, (damage, rejected)
        newer = [NEWEST, OLDER][: 4 - step]
        assert len(rejected) == len(newer), (damage, rejected)
        for text, name in zip(rejected, newer, strict=True):
            assert text.startswith(f"{name} is rejected: "), (damage, text)
            assert any(part in text for part in damage.names), (damage, text)
        # What was asked for by its name is not replaced by another.
        assert "checkpoint.resume = " in message and NEWEST in message, (damage, message)
        assert any(part in message for part in damage.names), (damage, message)
        detected[damage.kind] += 1
    assert not copies.exploited.exists(), "a pickle was read"
    return detected


def damage_one_shard_and_forge(copies):
    damage_one_shard(copies)
    forge(copies)


@pytest.mark.parametrize(
    ("work", "least"),
    [
        (damage_one_shard_and_forge, 45),
        pytest.param(damage_each_file, 60, marks=pytest.mark.slow),
    ],
)
def test_damage_is_detected_and_the_older_step_is_used(unbroken, tmp_path, work, least):
    copies = Copies(unbroken.checkpoints, tmp_path)
    work(copies)
    detected = check_all(copies)
    print(f"\n{len(copies.damages)} damages, {sum(detected.values())} detected: {dict(detected)}")
    assert sum(detected.values()) == len(copies.damages) >= least


def test_sound_checkpoints_alone_are_used(unbroken, tmp_path):
    copies = Copies(unbroken.checkpoints, tmp_path)
    plain = copies.copy()
    hint = copies.root / "hint"
    shutil.copytree(plain, hint)
    (hint / "latest").write_text("../../step-99\0\n")  # a hint, which nothing depends on
    (hint / "step-5.tmp").mkdir()
    (hint / "step-05").mkdir()
    spoiled = copies.root / "spoiled"
    shutil.copytree(plain, spoiled)
    for name, file in zip((NEWEST, OLDER, OLDEST), FILES, strict=False):
        flip_in(spoiled / name / file, 100)
    *sound, none = run_locally(find_in_all, RANKS, [plain, hint, spoiled])[0]
    for answer in sound:
        assert answer == (4, [], "used step 4")
    step, rejected, _ = none
    assert step is None
    assert [text.split(" ")[0] for text in rejected] == [NEWEST, OLDER, OLDEST]


def copied_run(unbroken, name):
    """A copy of the run, as if it had just ended."""
    run = Run(unbroken.config, name, (1, 2, 1), **KEEP)
    shutil.copytree(unbroken.folder, run.folder)
    return run


def flip_in(path, position):
    path.write_bytes(_flipped(position, 3)(path.read_bytes()))


def test_run_resumes_from_the_older_step(unbroken):
    run = copied_run(unbroken, "flipped")
    flip_in(run.checkpoints / NEWEST / SHARDS[1], 20_000)
    ended = run.start()
    check_resumed(ended, 3)
    assert f"resume  {NEWEST} is rejected: {SHARDS[1]} its contents do not" in ended[0].log
    assert f"set aside, no longer part of the run: {NEWEST}.rejected" in ended[0].log
    check_same(run, unbroken, tidy=False)


@pytest.mark.slow
def test_damaged_step_that_is_asked_for_is_refused(unbroken):
    run = copied_run(unbroken, "refused")
    flip_in(run.checkpoints / NEWEST / SHARDS[1], 20_000)
    refused = run.start(parallel3d__checkpoint__resume=4)
    assert [end.code for end in refused] == [2, 2]
    assert f"{SHARDS[1]} its contents do not match" in refused[0].log
    assert "Traceback" not in refused[0].log
    assert run.complete_steps() == [2, 3, 4]  # nothing was done to them


@pytest.mark.slow  # by default in tests/train/test_resume.py
def test_run_without_sound_checkpoint_starts_afresh_with_a_message(unbroken):
    run = copied_run(unbroken, "spoiled")
    for name, file in zip((NEWEST, OLDER, OLDEST), FILES, strict=False):
        flip_in(run.checkpoints / name / file, 100)
    ended = run.start()
    check_resumed(ended, 0)
    for name in (NEWEST, OLDER, OLDEST):
        assert f"resume  {name} is rejected: " in ended[0].log
    assert "NOTHING TO RESUME" in ended[0].log
    check_same(run, unbroken, tidy=False)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before_rename", "after_rename"])
def test_run_survives_a_kill_while_setting_a_checkpoint_aside(unbroken, point):
    run = copied_run(unbroken, f"aside-{point}")
    flip_in(run.checkpoints / NEWEST / SHARDS[0], 5)
    check_died(run.start(f"kill checkpoint.{point} 1 0"), 0)
    assert (run.checkpoints / NEWEST).exists() == (point == "before_rename")
    check_resumed(run.start(), 3)
    check_same(run, unbroken, tidy=False)
