import configparser
import os

from perun.util import matchesOneOf

from energynn.host.launchers import mpi_environment
from energynn.measure import perun_adapter


def test_perun_learns_of_the_processor_what_py_cpuinfo_would_say_after_a_second():
    import cpuinfo

    assert perun_adapter.processor_facts().items() <= cpuinfo.get_cpu_info().items()


def test_perun_is_told_everything_and_the_environment_cannot_overrule_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PERUN_SAMPLING_PERIOD", "5")
    environment = mpi_environment()
    assert not [name for name in environment if name.startswith("PERUN_")]
    perun_adapter.write_configuration(tmp_path, 0.25, [0, 12])
    ini = configparser.ConfigParser()
    ini.read(tmp_path / "perun.ini")
    assert (
        ini["monitor"]["sampling_period"] == "0.25"
        and ini["post-processing"]["pue"] == "1.0"
    )
    assert (
        ini["output"]["format"] == "hdf5"
        and str(tmp_path) not in (tmp_path / "perun.ini").read_text()
    )
    command = perun_adapter.command_under_perun(
        ["python"], ["train.py"], tmp_path / "100%"
    )
    assert command[command.index("--data_out") + 1] == os.path.relpath(
        tmp_path / "100%%" / "perun"
    )
    excluded = ini["monitor"]["exclude_sensors"].split(" ")
    powers = {number: f"CUDA:{number}_POWER" for number in (0, 1, 2, 11, 12, 120)}
    assert [
        number for number, name in powers.items() if not matchesOneOf(excluded, name)
    ] == [
        0,
        12,
    ]
