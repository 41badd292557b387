"""The model's curves in figures are those of forecasts, and end where no published run tells."""

import numpy as np

from energynn.analysis import modelled
from energynn.experiment import studies
from energynn.forecast import fits, predict


def test_curves_are_forecasts():
    fit = fits.published("resnet50", "horeka-a100")
    told = predict.forecasts(fit, studies.PAPER_STUDIES["R1"]("horeka-a100"))
    r1 = (
        modelled.load_forecasts("resnet50")
        .query("series == 'R1'")
        .set_index("quantity")
    )
    names = {"gpu_hours": "gpu_hours", "energy_kWh": "energy_total_kWh"}
    for name, quantity in names.items():
        expected = [[*row[name].values()] for row in told]
        np.testing.assert_allclose(r1.loc[quantity, [*told[0][name]]], expected)
    assert r1.loc["speed_up", "value"].iloc[0] == 1


def test_the_model_is_silent_where_no_published_run_tells():
    rows = modelled.load_forecasts("fourcastnet")
    # fine-tuning has another stage
    assert set(rows["series"]) == {"F1", "F3", "F4", "F5"}
    assert rows.groupby("series")["devices"].max().to_dict() == {
        "F1": 64,
        "F3": 64,
        "F4": 16,
        "F5": 32,
    }
