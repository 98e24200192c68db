"""Tables as strangers write them: delimiters, titles, decimal commas, encodings, missing values, odd names."""

from __future__ import annotations

import dataclasses
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image

from fedbn_flwr.client.state_folder import state_dir
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import OwnData, as_list, listed, load_dataset, own_info
from fedbn_flwr.lab.data.own.table_files import read_tables, table_columns
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data

HEADER = ["person id", "visit date", "age", "label"]
ROWS = [[f"p{at}", f"2024-01-{at + 1:02}", f"{30.5 + at}", str(at % 2)] for at in range(10)]
AGES = [30.5 + at for at in range(10)]


def joined(delimiter: str) -> str:
    return "\n".join(delimiter.join(row) for row in [HEADER, *ROWS]) + "\n"


def wanted(path: Path, text: str | bytes, **keys: str) -> OwnData:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return OwnData("csv", str(path), label_column="label", **{"feature_columns": "age", **keys})


def feature(request: OwnData, at: int = 0) -> list[float]:
    """Return the values of a feature, training and test rows, in their order."""
    data = load_dataset(own_info(request))
    return sorted(torch.cat([data.train.inputs, data.test.inputs])[:, at].tolist())


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", "~", "^"])
def test_the_delimiter_is_found(tmp_path: Path, delimiter: str) -> None:
    assert feature(wanted(tmp_path / "t.csv", joined(delimiter))) == AGES


@pytest.mark.parametrize(
    ("above", "delimiter"),
    [
        ("sep=;\n", ";"),
        ('"sep=^"\r\n', "^"),
        ("Export of 2024-02-01\n", ";"),
        ("Export,,,\n\n", ","),
        ("# visits, with ages\nSite: north\n", ","),
    ],
)
def test_lines_above_the_header_are_left_out_and_told(tmp_path: Path, above: str, delimiter: str) -> None:
    request = wanted(tmp_path / "t.csv", above + joined(delimiter))
    assert feature(request) == AGES
    notes = [note for note in own_info(request).notes if "above its header" in note]
    assert len(notes) == (0 if "sep=" in above else 1)


def test_a_header_that_lacks_a_name_is_no_title(tmp_path: Path) -> None:
    request = wanted(tmp_path / "t.csv", "age,label\n1,30,0\n2,31,1\n")
    with pytest.raises(DataError, match=r"line 2 of .* has 3 values, and the header in line 1 has 2 names"):
        own_info(request)


def test_a_table_of_one_column_has_one(tmp_path: Path) -> None:
    """Sniffing a delimiter would split its name at a letter."""
    with pytest.raises(ConfigError, match="feature-columns='age' is not a column"):
        own_info(wanted(tmp_path / "t.csv", "label\n" + "0\n1\n" * 5))


def test_decimal_commas_of_one_table_among_three(tmp_path: Path) -> None:
    for name, numbers in {"a": ["37.9", "38.1"], "b": ["36,6", "37,2"], "c": ["37", "39"]}.items():
        rows = [f"{number};{at % 2}" for at, number in enumerate(numbers * 3)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age;label", *rows]))
    keys = {"label_column": "label"}
    with pytest.raises(
        DataError, match=r"'age' has numbers with a decimal comma.*first in line 2 of b\), set decimal="
    ):
        own_info(OwnData("csv", str(tmp_path), **keys))
    found = feature(OwnData("csv", str(tmp_path), decimal="comma", **keys))
    assert found == sorted(np.float32([37.9, 38.1, 36.6, 37.2, 37, 39] * 3).tolist())


def test_a_point_beside_decimal_commas_may_be_a_thousands_separator(tmp_path: Path) -> None:
    text = "age;cost;label\n" + "37,5;1.250;0\n38,5;1.300;1\n" * 4
    with pytest.raises(DataError, match="a decimal comma in some columns and with a point in cost"):
        own_info(wanted(tmp_path / "t.csv", text, decimal="comma"))


def test_encodings(tmp_path: Path) -> None:
    text = "age,größe,label\n" + "".join(f"{age},1,{at % 2}\n" for at, age in enumerate(AGES))
    latin, path = text.encode("cp1252"), tmp_path / "t.csv"
    with pytest.raises(DataError, match=r"not UTF-8.*encoding=cp1252"):
        own_info(wanted(path, latin))
    with pytest.raises(ConfigError, match="encoding='cp12521'"):
        own_info(wanted(path, latin, encoding="cp12521"))
    with pytest.raises(DataError, match="neither UTF-8 nor encoding=ascii"):
        own_info(wanted(path, latin, encoding="ascii"))
    with pytest.raises(DataError, match=r"not UTF-8 \(it has bytes of value 0"):
        own_info(wanted(path, text.replace("größe", "size").encode("utf-16-le")))
    assert feature(wanted(path, text.encode("utf-16-le"), encoding="utf-16-le", feature_columns="age")) == AGES
    with pytest.raises(DataError, match=r"t\.csv is empty"):
        own_info(wanted(path, "sep=;\n\n"))
    columns = "age,größe"
    for content in (latin, text.encode(), text.encode("utf-8-sig"), text.encode("utf-16")):
        assert feature(wanted(path, content, encoding="cp1252", feature_columns=columns)) == AGES


def test_texts_of_missing_values_in_any_case(tmp_path: Path) -> None:
    gaps = ["n/a", "NULL", "#N/A", "null", "na ", "?", "", "nAn", "None", "40"]
    text = "age,label\n" + "".join(f"{gap},{at % 2}\n" for at, gap in enumerate(gaps))
    request = wanted(tmp_path / "t.csv", text, missing="mean")
    assert np.isnan(feature(request)).sum() == 9
    assert any(note.startswith("read as missing values in t.csv: #N/A, ?, N") for note in own_info(request).notes)
    odd = wanted(tmp_path / "t.csv", "age,label\n" + "-9,0\n40,1\n.,0\n41,1\n", missing="mean")
    with pytest.raises(DataError, match=r"numbers and text \(\.; first in line 4\).*missing-values="):
        own_info(odd)
    said = wanted(tmp_path / "t.csv", "age,label\n" + "-9,0\n40,1\n.,0\n41,1\n", missing="mean", missing_values=".,-9")
    assert np.isnan(feature(said)).sum() == 2


def test_a_word_that_is_no_missing_value_can_stay_a_category(tmp_path: Path) -> None:
    text = "smoking,label\n" + "none,0\nheavy,1\n" * 4
    keys = {"feature_columns": "smoking", "missing": "mean"}
    assert own_info(wanted(tmp_path / "t.csv", text, **keys)).feature_names == ("smoking=heavy",)
    kept = wanted(tmp_path / "t.csv", text, **keys, missing_values="NA")
    assert own_info(kept).feature_names == ("smoking=heavy", "smoking=none")
    classes = "age,label\n" + "40,none\n41,mild\n" * 4
    with pytest.raises(DataError, match=r"4 of the 8 values of .*'label' are missing.*missing-values=.*None"):
        own_info(wanted(tmp_path / "c.csv", classes))
    named = wanted(tmp_path / "c.csv", classes, missing_values="NA")
    assert own_info(named).class_names == ("mild", "none")


def test_lines_are_those_of_an_editor(tmp_path: Path) -> None:
    text = 'title\n\nname;age;label\n"a\nb";30;0\n\nc;31;1\nd;unknown;0\n'
    with pytest.raises(DataError, match=r"\(unknown; first in line 8\)"):
        own_info(wanted(tmp_path / "t.csv", text))
    with pytest.raises(DataError, match="the first is in line 5"):
        own_info(wanted(tmp_path / "t.csv", 'name;age;label\n"a\nb";30;0\n\nc;31;\n'))


LONG = "x" * 131_073  # a character more than csv reads


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"a,b,y\n1,2,0\n3,{LONG},1\n", "line 3 of .* in column 2 'b'"),
        (f"title\n\na;b;y\n1;2;0\n3;4;{LONG}\n", "line 5 of .* in column 3 'y'"),
        ("a,b,y\n" + "1,2,0\n" * 300 + f"3,4,0,{LONG}\n", "line 302 of .* in column 4\\."),
        ('a,b,y\n1,2,0\n3,"4,1\n' + "5,6,0\n" * 22_000, "line 3 of .* in column 2 'b'.*quote"),
        (f"a\n{LONG}\n", "line 2 of .* in column 1 'a'"),
        (f"a,{LONG},y\n1,2,0\n", r"line 1 of .* in column 2\."),
    ],
    ids=["value", "below a title", "beyond the header", "open quote", "one column", "name"],
)
def test_a_value_that_is_too_long_is_named_with_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(DataError, match=where):
        read_tables(wanted(tmp_path / "t.csv", text))


def test_a_line_that_is_longer_than_a_value_may_be_has_its_delimiter(tmp_path: Path) -> None:
    """Undivided, or divided by another character, it would be one value."""
    numbers = ";".join(["0.5"] * 40_000)
    names = ";".join(f"c{n}" for n in range(40_000))
    assert len(table_columns(wanted(tmp_path / "t.csv", f"{names}\n{numbers}\n"))) == 40_000


def test_names_with_commas_stand_in_quotes(tmp_path: Path) -> None:
    assert listed('a, "b, c" ,d') == ["a", "b, c", "d"]
    assert listed(as_list(["a", "b, c", 'd "e"'])) == ["a", "b, c", 'd "e"']
    lines = ['"age, years",label,site', *(f'{20 + at},"{"ab"[at % 2]}, x","{"ns"[at // 10]}, 1"' for at in range(20))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    keys = {
        "dataset": f"csv:{tmp_path / 't.csv'}",
        "label-column": "label",
        "client-column": "site",
        "feature-columns": '"age, years"',
        "class-names": '"b, x","a, x"',
        "held-out-clients": '"s, 1"',
        "num-clients": 1,
    }
    config = Config.make(keys)
    assert (config.data_info().feature_names, config.data_info().class_names) == (("age, years",), ("b, x", "a, x"))
    assert partitioned_data(config, count_clients(config)).held_out_names == ("s, 1",)
    with pytest.raises(ConfigError, match="'a,b' is not a column"):
        Config.make({**keys, "group-column": "a,b"})


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text(joined(","))
    config = Config.make({"dataset": "csv:~/t.csv", "label-column": "label", "feature-columns": "age", "out": "~/o"})
    assert (config.dataset, config.out) == (f"csv:{tmp_path / 't.csv'}", str(tmp_path / "o"))
    for where in ({"run_config": {"state-dir": "~/s"}}, {"node_config": {"state-dir": "~/s"}}):
        context = Context(1, 1, **{"node_config": {}, "run_config": {}, "state": RecordDict(), **where})
        assert state_dir(context) == tmp_path / "s"


def test_names_of_files_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    """Else the first file of results that names the client could not be written."""
    (tmp_path / "a.csv").write_text("age,label\n1,0\n2,1\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/h\xf6.csv")).write_text("age,label\n1,0\n2,1\n")
    with pytest.raises(DataError, match=r"1 files or folders are not UTF-8 \(h\\udcf6.csv\)"):
        own_info(OwnData("csv", str(tmp_path), label_column="label"))
    for folder in (b"cat", b"d\xf6g"):
        path = os.fsencode(tmp_path) + b"/images/" + folder
        os.makedirs(path)
        Path(os.fsdecode(path + b"/0.png")).write_bytes(b"")
    with pytest.raises(DataError, match=r"d\\udcf6g/0.png"):
        own_info(OwnData("folder", str(tmp_path / "images")))


@pytest.mark.parametrize("labels", [[1, 2], [0, 2], [0, 1], [1], [2]])
def test_labels_below_num_classes_are_the_classes_whichever_are_absent(tmp_path: Path, labels: list[int]) -> None:
    """A hospital without class 0 has the same numbers as one without class 2."""
    text = "age,label\n" + "".join(f"{at},{labels[at % len(labels)]}\n" for at in range(12))
    for keys in ({"num_classes": 3}, {"task": "binary"}):
        if max(labels) > 1 and "task" in keys:
            continue
        request = wanted(tmp_path / "t.csv", text, **keys)
        data = load_dataset(own_info(request))
        rows = torch.cat([data.train.inputs[:, 0], data.test.inputs[:, 0]]).int().tolist()
        targets = torch.cat([data.train.targets, data.test.targets]).tolist()
        assert targets == [labels[at % len(labels)] for at in rows]
        assert own_info(request).class_names == ()


def test_names_that_look_alike_are_one_name(tmp_path: Path) -> None:
    """A name may have its accents in its letters (NFC), or after them (NFD), as names of files on a Mac have."""
    for form in ("NFC", "NFD"):
        name, label = unicodedata.normalize(form, "é" + form), unicodedata.normalize(form, "Épanchement")
        rows = "".join(f"{at},{[label, 'non'][at % 2]}\n" for at in range(6))
        column = unicodedata.normalize(form, "âge")
        (tmp_path / f"{name}.csv").write_text(f"{column},label\n{rows}")
        for kind in (label, "non"):
            (tmp_path / f"i/{form}" / kind).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / f"i/{form}" / kind / "0.png")
    keys = {"label_column": "label", "feature_columns": unicodedata.normalize("NFD", "âge")}
    for request in (OwnData("csv", str(tmp_path), **keys), OwnData("folder", str(tmp_path / "i"))):
        assert own_info(request).class_names == ("non", "Épanchement")
    assert own_info(OwnData("csv", str(tmp_path), **keys)).feature_names == ("âge",)


def test_two_spellings_of_one_thing_are_told(tmp_path: Path) -> None:
    for name, sex in (("east", "fm"), ("north", ("female", "male"))):
        (tmp_path / f"{name}.csv").write_text("sex,label\n" + "".join(f"{sex[at % 2]},{at % 2}\n" for at in range(6)))
    (warning,) = own_info(OwnData("csv", str(tmp_path), label_column="label")).warnings
    assert warning.startswith("column 'sex': f, m only at east; female, male only at north (12 of 12 rows)")
    (warning,) = own_info(wanted(tmp_path / "t.csv", "sex,label\nF,0\nf,1\nm,1\n", feature_columns="sex")).warnings
    assert warning.startswith("categories of column 'sex' 'F' (1 rows), 'f' (1 rows) differ by case")
    request = wanted(tmp_path / "t.csv", "age,label\n1,No\n2,no\n3,yes\n")
    (warning,) = own_info(request).warnings
    assert warning.startswith("the classes 'No' (1 rows), 'no' (1 rows) differ by case")
    with pytest.raises(DataError, match=r"(?s)data-check=refuse.*'No' \(1 rows\), 'no'"):
        own_info(dataclasses.replace(request, data_check="refuse"))
    for kind in ("Cat", "cat"):
        (tmp_path / "i" / kind).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "i" / kind / "0.png")
    (warning,) = own_info(OwnData("folder", str(tmp_path / "i"))).warnings
    assert warning.startswith("the classes 'Cat' (1 rows), 'cat' (1 rows) differ by case")
    stated = own_info(OwnData("folder", str(tmp_path / "i"), class_names="cat,Cat"))
    assert (stated.num_classes, stated.warnings) == (2, ())
