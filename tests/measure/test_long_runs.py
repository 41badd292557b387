"""Long runs: samples that are read in blocks, thinned where they are many, in time and memory that grow as they do."""

import json
import time
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from energynn import records
from energynn.launch import watch
from energynn.measure import accounting, energy, plausible, samples
from energynn.measure.samples import Reader, read_phases, read_samples
from energynn.reading import ILL_TYPED
from tests.measure import worlds
from tests.measure.worlds import sensor

T0, PERIOD_S, WRAPS_AT = 10**12, 0.04, 65_712_999_613
SENSORS = [
    sensor("cpu_0", "energy", "cpu", to_SI=1e-6, wraps_at=float(WRAPS_AT)),
    sensor("gpu_0", "energy"),
    sensor("gpu_0_power", "power", primary=False, checks="gpu_0"),
]


def lines_of(count, first=0):
    """Lines as the sampler writes them: 100 W of a CPU whose counter wraps around, 200 to 300 W of a GPU."""
    step = np.arange(first, first + count)
    cpu, gpu_W = (step * 4_000_000 + WRAPS_AT - 10**9) % WRAPS_AT, 250 + 50 * np.sign(np.sin(step / 40))
    gpu = np.round(250 * PERIOD_S * step + 30 * np.abs(step % 251 / 251 - 0.5), 3)
    rows = zip((T0 + step * 40_000_000).tolist(), cpu.tolist(), gpu.tolist(), gpu_W.tolist(), strict=True)
    return [f'{{"t":{t},"w":{t + 1},"d":{t % 900},"v":[{c},{g},{w:.0f}]}}\n'.encode() for t, c, g, w in rows]


def write(folder, lines, sensors=SENSORS):
    header = {"header": "energynn-samples/1", "host": "h", "period_s": PERIOD_S, "sensors": sensors, "problems": []}
    path = folder / "samples-h.jsonl"
    path.write_bytes((json.dumps(header) + "\n").encode() + b"".join(lines))
    return path


NUMBERS = [
    b"null",
    b"0",
    b"7",
    b"0.5",
    b"0.3",
    b"59237.17",
    b"0.00000000000000000000000001234",
    b"9007199254740993.5",
    b"52.599998474121094",
    b"9007199254740993",
    b"262143328850",
]
ODD = [b"007", b"1.", b".5", b"1.2.3", b"1e-05", b"-1", b"-0", b"null5", b"5null", b"null.0", b"9223372036854775808"]
ODD += [b"", b"true", b'"1"', b"NaN", b"1 ", b"\r", b"nullnull", b"--1", b"1,2", b"[1]"]
OTHERS = [
    b'{"status":{"missed_deadlines":3}}\n',
    b'{"t":9,"w":9,"perun":{"a":1}}\n',
    b"\n",
    b"]}\n",
    b"\xff\n",
    b"{}\n",
    b'{"t":1,"perun":{"a":1\n"b":2}}\n',  # lines that only together are JSON
    b'{"status":[{}\n{}]},{"status":1}\n',
]


def some_lines(random):
    """Samples with one odd number, one byte changed or a cut here and there, other lines between."""
    lines = []
    for _ in range(200):
        numbers = [str(random.integers(10**9)).encode() for _ in range(3)] + list(random.choice(NUMBERS, 3))
        kind = random.integers(40)
        if kind < 3:
            numbers[random.integers(6)] = ODD[random.integers(len(ODD))]
        line = b'{"t":%b,"w":%b,"d":%b,"v":[%b,%b,%b]}\n' % tuple(numbers)
        at = random.integers(len(line))
        if kind == 3:
            line = line[:at] + bytes([random.integers(256)]) + line[at + 1 :]
        if kind == 4:
            line = line[:at] + line[at + random.integers(5) :]
        if kind == 6:
            line = line[:at] + b"5" + line[at:]
        lines.append(line)
        if kind == 5:
            lines.append(OTHERS[random.integers(len(OTHERS))])
    return lines


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_read_as_line_by_line_whatever_is_damaged(tmp_path, monkeypatch, seed):
    random = np.random.default_rng(seed)
    header = json.dumps({"header": 1, "host": "h", "period_s": 0.04, "sensors": SENSORS}).encode() + b"\n"
    path = write(tmp_path, [*some_lines(random), header, *some_lines(random)])
    monkeypatch.setattr(samples, "BLOCK_B", int(random.choice([100, 3000, 2**20])))
    fast = read_samples(path)
    monkeypatch.setattr(Reader, "_take_at_once", lambda reader, block: False)
    monkeypatch.setattr(Reader, "_take_others", lambda reader, lines: [reader._take_line(line) for line in lines])
    slow = read_samples(path)
    for name in ("t_ns", "wall_ns", "readings", "duration_us"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name
    assert (fast.unreadable_lines, fast.status, fast.perun) == (slow.unreadable_lines, slow.status, slow.perun)
    assert 300 < len(fast.t_ns) < 400 and fast.unreadable_lines > 5


def test_a_damaged_line_costs_its_neighbours_no_time(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(Reader, "_take_line", lambda reader, text: taken.append(text) or reader._take(json.loads(text)))
    path = write(tmp_path, [*lines_of(2000), b'{"t":5,"w":5,"d":5,"v":[1,2,1e-7]}\n', *lines_of(2000, 2000)])
    assert len(read_samples(path).t_ns) == 4001 and len(taken) < 20


IN_PHASES = [b"0", b"9", b",", b"[", b"]", b"-", b".", b" ", b"\r", b"\x0b", b"\xe2", b'"', b"null", b"1e3", b"\n"]
IN_PHASES += [str(2**63 - 1).encode(), str(2**70).encode()]

IN_PERUN = [b"0", b"e", b",", b"{", b"}", b"-", b".", b" ", b"\r", b"\\", b"\xe2", b'"', b"NaN", b"1e999", b"\n", b":{"]
IN_PERUN += [str(2**70).encode(), b"9" * 5000, b',"h_RAM":1']


def with_faults(line, parts, random, most):
    """A line in which some of these parts were written over others, or between them, at most so often."""
    for _ in range(random.integers(most + 1)):
        at = random.integers(len(line) - 1)
        line = line[:at] + random.choice(parts) + line[at + random.integers(3) :]
    return line


def phases_or_fault(folder):
    try:
        return {rank: [np.asarray(part).tolist() for part in parts] for rank, parts in read_phases(folder).items()}
    except ILL_TYPED as error:
        return type(error).__name__, str(error)


def test_phases_are_read_at_once_as_line_by_line_whatever_is_damaged(tmp_path, monkeypatch):
    random, at_once, read = np.random.default_rng(7), samples._lines_of_phases, []
    line = b'{"t":50171866129496,"phase":[0,1,2],"gap_us":[0,10,200],"length_us":[5,60,700]}\n'
    for _ in range(1000):
        damaged = with_faults(line, IN_PHASES, random, most=2)
        (tmp_path / "phases-rank0.jsonl").write_bytes(b'{"names":["a"]}\n' + damaged + line)
        monkeypatch.setattr(samples, "_lines_of_phases", lambda texts: read.append(at_once(texts)) or read[-1])
        fast = phases_or_fault(tmp_path)
        monkeypatch.setattr(samples, "_lines_of_phases", lambda texts: {})
        assert phases_or_fault(tmp_path) == fast, damaged
    assert 300 < sum(len(lines) == 2 for lines in read) < 700


DECODED_ALONE = samples._decoded_alone
IN_EVENTS = [b"0", b",", b"{", b"}", b"[", b"]", b":", b'"', b" ", b"NaN", b"\n", b"\x0b", b"},{", b",{}", b"9" * 5000]


def test_events_are_read_at_once_as_line_by_line_whatever_is_damaged(tmp_path, monkeypatch):
    random, read, alone = np.random.default_rng(9), samples._decoded, []
    line = b'{"t_mono_ns": 5, "t_wall_ns": 7, "event": "epoch", "facts": {"loss": NaN, "name": "a"}}\n'
    for _ in range(2000):
        damaged = with_faults(line, IN_EVENTS, random, most=3)
        (tmp_path / "events-rank0.jsonl").write_bytes(line + damaged + line)
        count = mock.Mock(side_effect=DECODED_ALONE)
        monkeypatch.setattr(samples, "_decoded", read)
        monkeypatch.setattr(samples, "_decoded_alone", count)
        fast = samples.read_events(tmp_path)
        monkeypatch.setattr(samples, "_decoded", lambda texts: list(map(DECODED_ALONE, texts)))
        assert samples.read_events(tmp_path) == fast, damaged
        alone.append(count.called)
    assert 500 < sum(alone) < 1900


def test_what_perun_read_is_kept_as_text_only_where_it_is_as_the_sampler_writes_it(tmp_path, monkeypatch):
    random, keep, kept = np.random.default_rng(8), Reader._keep_of_perun, []
    line = b'{"t":5,"w":1795283971941004714,"perun":{"h_RAM":1540247552,"h_CPU_0":-8.199999809265137e-05}}\n'
    header = json.dumps({"header": 1, "host": "h", "period_s": 0.04, "sensors": SENSORS}).encode() + b"\n"
    for _ in range(1000):
        damaged = with_faults(line, IN_PERUN, random, most=2)
        path = write(tmp_path, [header, line, damaged, lines_of(1)[0], line, b'{"status":{}}\n'])
        monkeypatch.setattr(Reader, "_keep_of_perun", keep)
        fast = read_samples(path)
        monkeypatch.setattr(Reader, "_keep_of_perun", lambda reader, lines: lines)
        slow = read_samples(path)
        assert (fast.perun, fast.status) == (slow.perun, slow.status), damaged
        assert fast.unreadable_lines == slow.unreadable_lines, damaged
        kept.append(any(isinstance(part, bytes) for part in fast.perun_lines))
    assert 300 < sum(kept) < 800


def changed(joules, random):
    """Readings of a counter with one fault, or none."""
    at, fault = random.integers(len(joules)), random.integers(6)
    stuck, joules = int(random.choice([2, 3, 4, 5, 10, len(joules)])), joules.copy()
    if fault == 1:
        joules[at : at + stuck] = joules[at]
    if fault == 2:
        joules[at:] += random.choice([-1, 1]) * 10 ** random.uniform(0, 6)
    if fault == 3:
        joules[at] *= 1000
    if fault == 4:
        joules[:] = joules[0]
    if fault == 5:
        joules[at:] = joules[at] + (joules[at:] - joules[at]) // 1000
    return joules


def test_a_glance_at_a_counter_tells_what_a_long_look_does(monkeypatch):
    random, glances, glance = np.random.default_rng(5), [], plausible._is_sound

    def noted(*counter):
        glances.append(glance(*counter))
        return glances[-1]

    for number in range(400):
        world, *_ = worlds.world(worlds.KINDS[number % 2], float(random.choice([0.01, 0.04, 0.1])), "aligned", random)
        last = 3 + number % 3 if number % 5 == 0 else len(world.t_ns)
        counter = world.readings[:last, 0]
        world = replace(world, t_ns=world.t_ns[:last], readings=changed(counter, random)[:, None])
        monkeypatch.setattr(plausible, "_is_sound", noted)
        (short,) = plausible.judge(world)
        monkeypatch.setattr(plausible, "_is_sound", lambda *counter: False)
        (long,) = plausible.judge(world)
        assert short.sensor == long.sensor and (short.good == long.good).all()
        for name in ("unknown", "energy_J", "variance_J2"):
            assert np.array_equal(getattr(short, name), getattr(long, name)), name
    assert 50 < sum(glances) < 350


# ------------------------------------------------------------------------------------------------------------ thinning


@pytest.fixture
def long_run(run_dir, monkeypatch):
    """A run whose samples are too many for a view."""
    next(run_dir.glob("samples-*.jsonl")).unlink()
    for rank in range(2):
        marks = [(100.0, "rank_start", {"host": "h"}), (200.0, "training_start", {}), (1100.0, "training_end", {})]
        marks = [{"t_mono_ns": T0 + int(t * 1e9), "t_wall_ns": int(t * 1e9), "event": e, **m} for t, e, m in marks]
        (run_dir / f"events-rank{rank}.jsonl").write_text("".join(json.dumps(mark) + "\n" for mark in marks))
    write(run_dir, lines_of(30_000))
    monkeypatch.setattr(samples, "LARGE_B", 2**20)
    monkeypatch.setattr(samples, "EDGE_B", 2**12)
    monkeypatch.setattr(samples, "THINNED", 50)
    return run_dir


def test_a_thinned_file_has_the_energies_of_the_whole(long_run):
    path = long_run / "samples-h.jsonl"
    reader = Reader(path)
    reader.read_thinned(50)
    thinned, whole = reader.samples(), read_samples(path)
    assert 80 < len(thinned.t_ns) < 200 and (np.diff(thinned.t_ns) > 0).all()
    assert (thinned.t_ns[0], thinned.t_ns[-1]) == (whole.t_ns[0], whole.t_ns[-1])
    assert thinned.thinned_s == pytest.approx(1200 / 50, rel=0.1) and whole.thinned_s == 0
    window = int(whole.t_ns[0]), int(whole.t_ns[-1])
    for curve, counted_J in zip(energy.curves(thinned), (100 * 1200, 250 * 1200), strict=False):
        assert curve.between(*window)[0] == pytest.approx(counted_J, rel=1e-3), "a lost wrap costs 65 kJ"
        at_lines_J = curve.at(thinned.t_ns[100:]) - curve.at(thinned.t_ns[100])
        column = thinned.readings[100:, 0 if curve.sensor["component"] == "cpu" else 1]
        steps_J = np.diff(column) % WRAPS_AT * curve.sensor["to_SI"]
        assert at_lines_J[1:] == pytest.approx(np.cumsum(steps_J), rel=1e-2, abs=15.0), "exact but for one sample"
    reader.read()
    assert len(reader.times) == len(thinned.t_ns), "what follows is read from the end on"


def test_views_of_a_long_run_are_thinned_and_say_so(long_run):
    with pytest.warns(UserWarning, match="thinned, a sample in .*; peaks between are not seen"):
        t_s, power_W = energy.power_trace(long_run)["cpu_0"]
    assert len(t_s) < 60 and power_W == pytest.approx(100.0, rel=1e-3)
    state = watch.look(long_run, {})
    assert state["thinned_s"] == pytest.approx(23, abs=3)
    assert f"thinned: until now a sample in {state['thinned_s']:.3g} s; peaks between are not seen" in watch.text(state)
    by_id = {device["id"]: device for device in state["devices"]}
    assert by_id["cpu_0"]["energy_J"] == pytest.approx(90_000, rel=1e-3)
    assert by_id["gpu_0"]["energy_J"] == pytest.approx(250 * 900, rel=1e-3)
    assert by_id["cpu_0"]["power_W"] == pytest.approx(100, rel=0.05)


# ------------------------------------------------------------------------------------------------------ time and memory


def cpu_s(function):
    begun = time.process_time()
    function()
    return time.process_time() - begun


def hostile(count, wave):
    """Samples of a power that often stays the same while another moves, and of a counter with misreads."""
    step = np.arange(count)
    watts = np.where(step // 60 % 2, 100.0 + step // 60 % 7, 150.0 + step % 13)
    joules = np.cumsum(100.0 + 50 * np.sign(np.sin(step / wave))) * PERIOD_S
    misread = np.where(step % 5000 > 4000, joules * 1000, joules)
    t_ns = T0 + step * 40_000_000
    sensors = [sensor("p", "power"), sensor("e", "energy", device="1"), sensor("m", "energy", device="2")]
    header = {"host": "h", "period_s": PERIOD_S, "sensors": sensors, "problems": []}
    return samples.Samples(header, t_ns, t_ns, np.stack([watts, joules, misread], axis=1), np.zeros(count))


def test_time_grows_as_the_samples_do(tmp_path):
    """Four times the samples, also hostile ones, take no more than about six times the time."""
    marks = accounting.marks_of(tmp_path, [])
    times_s = []
    for count in (10_000, 40_000):
        path = write(tmp_path, lines_of(count))
        hard = hostile(count, wave=1000)
        reads = min(cpu_s(lambda path=path: accounting.read_host(path, [marks])) for _ in range(3))
        judges = min(cpu_s(lambda hard=hard: plausible.judge(hard)) for _ in range(3))
        times_s.append((reads, judges))
    for few_s, many_s in zip(*times_s, strict=True):
        assert many_s < 8 * few_s, times_s


def test_memory_is_that_of_the_numbers(tmp_path):
    count = 40_000
    path = write(tmp_path, lines_of(count))
    numbers_B = count * 8 * (3 + len(SENSORS))
    tracemalloc.start()
    read_samples(path)
    most_B = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_B < 3 * numbers_B + 16 * samples.BLOCK_B, "as JSON the lines take 30 times their numbers"


def test_many_records_are_checked_by_several_processes_with_the_same_faults(run_dir, monkeypatch):
    records.build(run_dir, "finished", "")
    for name in ("a", "b", "c"):
        copy = run_dir.parent / name
        copy.mkdir()
        for file in ("run.json", "record.json"):
            (copy / file).write_bytes((run_dir / file).read_bytes())
    alone = records.check(run_dir.parent.parent)
    monkeypatch.setattr(records, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(records.os, "sched_getaffinity", lambda process: {0, 1})
    assert records.check(run_dir.parent.parent) == alone and len(alone) > 3
