"""The data check of own data: what it finds, with evidence, and what it must not call suspicious."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import OwnData, load_dataset, own_info
from fedbn_flwr.lab.data.local_dataset import load_local_dataset
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import run

SHARED = Path(__file__).parents[3].parent / "shared/data"
N = 60
DRAW = np.random.default_rng(0)
SOUND: Mapping[str, Sequence[Any]] = {
    "age": DRAW.normal(55, 9, N).round().astype(int).tolist(),
    "level": DRAW.normal(5.5, 1, N).round(2).tolist(),
    "sick": (DRAW.random(N) < 0.4).astype(int).tolist(),
    "hospital": (["east"] * (N // 2)) + ["west"] * (N // 2),
}
Found = Callable[..., tuple[str, ...]]


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """``found(column=[...], keys={...})``: the warnings of a table of 60 rows with these columns, too."""

    def do(keys: Mapping[str, Any] = {}, **columns: Sequence[Any]) -> tuple[str, ...]:
        table = {**SOUND, **columns}
        path = tmp_path / f"t{len(list(tmp_path.iterdir()))}.csv"
        path.write_text(
            "\n".join([",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))])
        )
        settings = {"label_column": "sick", "client_column": "hospital", "missing": "mean", **keys}
        return own_info(OwnData("csv", str(path), **settings)).warnings

    return do


def shuffled(values: Sequence[Any]) -> list[Any]:
    return np.random.default_rng(1).permutation(np.array(values, object)).tolist()


def test_a_sound_table_has_no_finding(found: Found) -> None:
    assert found() == ()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("study_id", shuffled(range(5000, 900000, 900)[:N])),
        ("z", [100 + 7 * k for k in range(N)]),
        ("z", shuffled(range(1, N + 1))),
        ("z", [*range(1, N // 2 + 1)] * 2),
        ("PatientNr", shuffled(range(5000, 900000, 900)[:N])),
        ("z", [1e6 - k for k in range(N)]),
    ],
    ids=["called so", "rising", "dense", "begins anew at each client", "called so in capitals", "falling"],
)
def test_numbers_of_rows_and_patients_are_found(name: str, values: list[Any], found: Found) -> None:
    (line,) = found(**{name: values})
    assert f"column {name!r}" in line
    assert "60 different whole numbers in 60 rows" in line


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("platelets", np.random.default_rng(2).integers(100_000, 450_000, N).tolist()),
        ("visits", [k // 2 for k in range(N)]),
        ("identity", (np.random.default_rng(3).normal(0, 1, N)).round(5).tolist()),
        ("nodes", np.random.default_rng(4).integers(0, 400_000, N).tolist()),
    ],
    ids=["different by chance", "twice each", "fractions", "a word that begins like no"],
)
def test_measurements_that_all_differ_are_no_ids(name: str, values: list[Any], found: Found) -> None:
    assert found(**{name: values}) == ()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patient_id", np.repeat(shuffled(range(5000, 900000, 900)[: N // 2]), 2).tolist()),
        ("SubjectID", [f"P{at}" for at in shuffled([k // 2 for k in range(N)])]),
    ],
    ids=["numbers", "texts"],
)
def test_ids_of_patients_with_several_rows_are_found_by_their_name(name: str, values: list[Any], found: Found) -> None:
    lines = found(**{name: values})
    assert any(line.startswith(f"column {name!r}: 30 different values in 60 rows") for line in lines)
    assert found(**{name: [k % 12 for k in range(N)]}) == (), "few values are no ids"
    assert found({"group_column": name}, **{name: values}) == (), "it is no feature"


def test_texts_that_all_differ_are_found(found: Found, tmp_path: Path) -> None:
    rows = [f"{SOUND['level'][k]},p{k},{SOUND['sick'][k]}" for k in range(24)]
    (tmp_path / "names.csv").write_text("\n".join(["level,name,sick", *rows]))
    found_here = own_info(OwnData("csv", str(tmp_path / "names.csv"), label_column="sick")).warnings
    assert any("24 different texts in 24 rows" in line for line in found_here)


SICK = np.array(SOUND["sick"])


@pytest.mark.parametrize(
    ("column", "evidence"),
    [
        ((SICK * 10 + np.random.default_rng(5).random(N)).round(3).tolist(), "AUROC 1.0000 in 60 rows"),
        ((-SICK * 10 + np.random.default_rng(5).random(N)).round(3).tolist(), "AUROC 1.0000 in 60 rows"),
        ([["no", "yes"][k] for k in SICK], "gives the class in 60 of 60 rows"),
        ([[1, 3, 2][k] if k == 1 else [1, 2][at % 2] for at, k in enumerate(SICK)], "60 of 60 rows"),
        (
            [v if k else "" for v, k in zip(SOUND["level"], SICK, strict=True)],
            "where it is missing",
        ),
    ],
    ids=["above", "below", "text", "codes in no order", "missing where not sick"],
)
def test_a_column_that_separates_the_targets_alone_is_found(column: list[Any], evidence: str, found: Found) -> None:
    (line,) = found(result=column)
    assert "column 'result' alone separates the targets" in line
    assert evidence in line


def test_of_several_classes_labels_and_of_numbers(found: Found, tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    stages = draw.integers(0, 4, N)
    (line,) = found({}, sick=stages.tolist(), result=(stages * 3 + draw.random(N)).round(3).tolist())
    assert "AUROC 1.0000" in line
    costs = draw.normal(100, 20, N).round(3)
    (line,) = found({"task": "regression"}, sick=costs.tolist(), result=(costs**2).round(3).tolist())
    assert "rank correlation 1.0000" in line
    labels = {"label_column": "sick,other", "task": "multi-label"}
    (line,) = found(labels, other=(draw.random(N) < 0.5).astype(int).tolist(), result=[5 + int(k) for k in SICK])
    assert "separates the targets 0 of 2" in line


def test_a_good_predictor_and_few_positives_are_no_leak(found: Found) -> None:
    draw = np.random.default_rng(7)
    assert found(result=(SICK + draw.normal(0, 0.45, N)).round(3).tolist()) == ()
    one = [int(k == 7) for k in range(N)]
    assert found(sick=one, result=[float(k) + draw.random() for k in one]) == ()


@pytest.mark.parametrize(
    ("column", "evidence"),
    [
        (
            [["m", "f"][k % 2] if k < 30 else ["male", "female"][k % 2] for k in range(N)],
            "f, m only at east; female, male only",
        ),
        ([k % 2 + (k < 30) for k in range(N)], "0 only at west; 2 only at east"),
        (["A"] * 15 + ["B"] * 15 + ["A"] * 30, "B only at east (15 of 60 rows)"),
    ],
    ids=["spellings", "codes", "one category"],
)
def test_a_category_of_one_client_is_found(column: list[Any], evidence: str, found: Found) -> None:
    (line,) = found(sex=column)
    assert "column 'sex'" in line
    assert evidence in line


def test_small_tables_say_what_is_no_accident(tmp_path: Path) -> None:
    """Six rows at each of two hospitals."""
    (tmp_path / "t").mkdir()
    for name, sexes in {"east": "mf", "west": ["male", "female"]}.items():
        rows = [f"{k * k % 11 + 40},{sexes[k % 2]},{k + 1},{k // 3}" for k in (3, 1, 5, 0, 4, 2)]
        (tmp_path / "t" / f"{name}.csv").write_text("\n".join(["age,sex,study_id,sick", *rows]))
    sex, *others = sorted(own_info(OwnData("csv", str(tmp_path / "t"), label_column="sick")).warnings)
    assert "f, m only at east; female, male only at west (12 of 12 rows)" in sex
    assert others == []


def test_a_rare_category_may_be_at_one_client_by_chance(found: Found) -> None:
    assert found(sex=[*"AB" * 28, "C", "C", "A", "B"]) == ()
    assert found({"client_column": ""}, hospital=[*"AB" * 30], sex=[*"AB" * 30]) == ()


@pytest.mark.parametrize("other", ["no", "NO", "n o", "Ｎo"])  # noqa: RUF001 a wide N
def test_names_that_look_alike_are_found(other: str, found: Found) -> None:
    """Classes, categories, columns and clients."""
    of_classes = [["No", other, "yes"][k % 3] for k in shuffled(range(N))]
    (line,) = found(sick=of_classes)
    assert line.startswith("the classes ")
    assert f"'No' (20 rows), {other!r} (20 rows)" in line.replace(
        f"{other!r} (20 rows), 'No' (20 rows)", f"'No' (20 rows), {other!r} (20 rows)"
    )
    (line,) = found(smokes=of_classes)
    assert line.startswith("categories of column 'smokes'")
    level = np.random.default_rng(8).normal(0, 1, N).round(3).tolist()
    (line,) = found(**{"No": level, other: level[::-1]})
    assert line.startswith("the columns ")
    (line,) = found(hospital=["No" if k < 30 else other for k in range(N)])
    assert line.startswith("the clients ")


@pytest.mark.parametrize(
    ("code", "count"),
    [(-99, 5), (999, 3), (-1, 4), (-9, 3), (0, 12), (999.9, 3), (99.99, 2)],
    ids=["-99", "999", "-1", "-9", "0", "999.9", "99.99"],
)
def test_a_number_that_stands_for_a_missing_value_is_found(code: float, count: int, found: Found) -> None:
    column = [*SOUND["age"]]
    for at in range(count):
        column[at * 4] = code
    (line,) = found(age=column)
    rest = [value for value in column if value != code]
    assert f"column 'age': {code} in {count} of 60 rows, and the others are {min(rest)} to {max(rest)}" in line


def test_several_such_numbers_and_those_of_one_client(found: Found) -> None:
    column = [*SOUND["age"]]
    column[:8] = [998, 999, 999, 999, -99, -99, -99, 998]
    (line,) = found(age=column)
    assert "-99, 998, 999 in 8 of 60 rows" in line
    large = [v if k < 30 else 40 * v for k, v in enumerate(SOUND["age"])]  # another unit at west
    large[3:9] = [300] * 6
    (line,) = found(age=large)
    assert "300 in 6 of 30 rows of east" in line


@pytest.mark.parametrize(
    "column",
    [
        np.random.default_rng(9).poisson(0.7, N).tolist(),
        np.random.default_rng(9).exponential(20, N).round().tolist(),
        [*np.random.default_rng(9).normal(50, 5, N - 1).round().tolist(), 999],
        [0.0 if k % 3 else v for k, v in enumerate(SOUND["level"])],
        np.random.default_rng(9).normal(0, 3, N).round().tolist(),
        [min(k, 90) for k in np.random.default_rng(9).normal(80, 12, N).round().tolist()],
    ],
    ids=["counts", "skewed", "a single outlier", "mostly zero", "both signs", "a ceiling"],
)
def test_zeros_counts_ceilings_and_outliers_are_not_called_missing(column: list[Any], found: Found) -> None:
    assert found(age=column) == ()


NFC = [unicodedata.normalize("NFC", text) for text in ("Épanchement", "âge", "façade")]
NFD = [unicodedata.normalize("NFD", text) for text in NFC]


def test_the_two_unicode_forms_of_a_name_are_one(tmp_path: Path) -> None:
    """At two clients of one federation: a class, a column, a category, and the config's names of them."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, (ill, age, skin) in {"a": NFC, "b": NFD}.items():
        rows = [f"{50 + k % 7},{[skin, 'rest'][k % 2]},{[ill, 'well'][k % 3 % 2]}" for k in range(30)]
        (folder / f"{name}.csv").write_text("\n".join([f"{age},peau,y", *rows]), encoding="utf-8")
    for ill, age, skin in (NFC, NFD):
        keys = {"label_column": "y", "feature_columns": f"{age},peau:{skin}|rest", "class_names": f"well,{ill}"}
        for stated in (keys, {"label_column": "y"}):
            info = own_info(OwnData("csv", str(folder), **stated))
            assert sorted(info.class_names) == ["well", NFC[0]]
            assert sorted(info.feature_names) == sorted([NFC[1], f"peau={NFC[2]}", "peau=rest"])
            assert info.warnings == ()
    twice = tmp_path / "twice.csv"
    twice.write_text(f"{NFC[1]},{NFD[1]},y\n1,2,0\n2,1,1\n", encoding="utf-8")
    with pytest.raises(DataError, match="two columns"):
        own_info(OwnData("csv", str(twice), label_column="y"))


def test_class_folders_and_arrays_in_two_unicode_forms_are_one_class(tmp_path: Path) -> None:
    for client, ill in (("a", NFC[0]), ("b", NFD[0])):
        for label in (ill, "well"):
            folder = tmp_path / "images" / client / label
            folder.mkdir(parents=True)
            for at in range(4):
                pixels = np.random.default_rng(at).integers(0, 256, (6, 6, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{at}.png")
    for classes in ("", f"well,{NFD[0]}"):
        info = own_info(OwnData("folder", str(tmp_path / "images"), class_names=classes))
        assert sorted(info.class_names) == ["well", NFC[0]]
        assert len(load_dataset(info, size=6).train) + len(load_dataset(info, size=6).test) == 16
    np.savez(tmp_path / "a.npz", x=DRAW.normal(0, 1, (8, 2)), y=[NFC[0], NFD[0], "well", "well"] * 2)
    assert sorted(own_info(OwnData("npz", str(tmp_path / "a.npz"))).class_names) == ["well", NFC[0]]
    data = load_local_dataset(str(tmp_path / "images/b"), "digits", 1, 8, classes=("well", NFC[0]))
    assert sorted(set(data.train.labels.tolist())) == [0, 1]


def test_held_out_clients_are_named_in_either_form(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("a", "b", NFD[0]):
        rows = [f"{50 + k % 7},{k % 2}" for k in range(30)]
        (folder / f"{name}.csv").write_text("\n".join(["x,y", *rows]), encoding="utf-8")
    settings = {"dataset": f"csv:{folder}", "label-column": "y", "held-out-clients": NFC[0]}
    assert partitioned_data(Config.make(settings), 2).held_out_names == (NFC[0],)


@pytest.fixture
def leaky(tmp_path: Path) -> dict[str, Any]:
    """The settings of a run on a table with row numbers and -99."""
    table = {"nr": [*range(N)], **SOUND, "age": [-99 if k % 9 == 0 else v for k, v in enumerate(SOUND["age"])]}
    rows = [",".join(map(str, row)) for row in zip(*table.values(), strict=True)]
    (tmp_path / "leaky.csv").write_text("\n".join([",".join(table), *rows]))
    return {
        **{"dataset": f"csv:{tmp_path / 'leaky.csv'}", "label-column": "sick", "client-column": "hospital"},
        **{"num-server-rounds": 1, "local-steps": 1, "batch-size": 8},
    }


def test_the_findings_are_said_before_round_1_and_by_partition_and_inspect(
    leaky: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(Config.make(leaky), tmp_path / "out", workers=0)
    wanted = ("column 'nr': 60 different whole numbers", "column 'age': -99 in 7 of 60 rows")
    of_data = json.loads((tmp_path / "out/data.json").read_text())["warnings"]
    keys = [f"--set={key}={value}" for key, value in leaky.items()]
    for command in (["partition"], ["inspect", "--model", "mlp", "--strategy", "fedbn"]):
        result = CliRunner().invoke(app, [*command, *keys])
        assert result.exit_code == 0, result.output
        for line in wanted:
            assert line in result.output.replace("\n", " ")
    for line in wanted:
        assert any(line in text for text in of_data)
        assert any(line in record.getMessage() for record in caplog.records)


def test_refuse_makes_errors_of_all_findings_before_anything_is_written(leaky: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(Config.make({**leaky, "data-check": "refuse"}), tmp_path / "out", workers=0)
    for line in ("data-check=refuse", "column 'nr'", "column 'age'"):
        assert line in str(caught.value)
    assert not (tmp_path / "out").exists()
    sound = {**leaky, "data-check": "refuse", "feature-columns": "level"}
    run(Config.make(sound), tmp_path / "out", workers=0)
    with pytest.raises(ConfigError, match="data-check"):
        Config.make({"data-check": "refuse"})


def test_the_tables_of_scikit_learn_have_no_finding(tmp_path: Path) -> None:
    from sklearn import datasets

    for load, task in (("load_wine", ""), ("load_breast_cancer", ""), ("load_diabetes", "regression")):
        inputs, targets = getattr(datasets, load)(return_X_y=True)
        np.savez(tmp_path / f"{load}.npz", x=inputs, y=targets)
        assert own_info(OwnData("npz", str(tmp_path / f"{load}.npz"), task=task)).warnings == (), load


@pytest.mark.parametrize("positive", [">0", ""])
def test_heart_disease_of_four_hospitals_has_the_one_finding_that_is_true(positive: str) -> None:
    """Cholesterol is 0 in all of Switzerland and in 49 patients of VA: it was not measured."""
    folder = SHARED / "heart_disease"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    request = OwnData("csv", str(folder), label_column="target", positive_values=positive, missing="mean")
    (line,) = own_info(request).warnings
    assert "column 'chol': 0 in 172 of 890 rows, and the others are 85 to 603" in line
