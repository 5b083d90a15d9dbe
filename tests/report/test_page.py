"""The page needs nothing from outside, trusts nothing inside, and stays light."""

import json
import re
from urllib.parse import unquote

import pytest

from fedrts import report
from fedrts.report import html
from fedrts.report.content import compose
from fedrts.report.read import Found, Run, find
from handmade import belief, fairness, line, write


def data_of(page):
    (content,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    return json.loads(content)


def test_the_page_names_no_address_and_its_policy_allows_none(tmp_path):
    write(tmp_path / "a", [0.5] * 10)
    page = html.render(compose(find([tmp_path])))
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:link[^>]*href|script[^>]*src|img[^>]*src)=\"(?!data:)", page)


def test_names_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    for number in (0, 1):
        write(tmp_path / str(number), [0.5] * 10, data="digits", method_options={"note": f"{evil}{number}"})
    page = html.render(compose(find([tmp_path])))
    assert evil not in page
    assert page.count("<script") == 2
    names = [series["name"] for series in data_of(page)["digits-mlp-accuracy-rounds"]["series"]]
    assert any(evil in name for name in names)


@pytest.fixture(scope="module")
def many():
    """100 settings × 1 seed of 500 rounds, evaluated in every one."""
    runs = []
    for number in range(100):
        settings = {"method": "fedrts", "data": "digits", "model": "mlp", "density": 0.2, "rounds": 500, "seed": 0, "train.lr": number / 7}
        history = [line(index, (index * 7919 + number) % 1009 / 1009) for index in range(500)]
        topology = [belief(index) for index in range(0, 300, 10)]
        clients = [{"client": n, "samples": 100, "labels": [n % 7] * 10} for n in range(100)]
        summary = {"density": 0.2, "accuracy_last10": 0.5, "best_accuracy": 0.6, "loss": 0.1, "upload_bytes": 1, "download_bytes": 1}
        summary |= {"comm_ratio": 0.2, "paper_comm_mb": 1.0, "flops": 1.0, "seconds": 1.0, "samples_per_second": 1.0}
        judged = fairness([n / 100 for n in range(100)], [0.5] * 10)
        runs.append(
            Run(f"runs/{number}", settings, {}, False, history, topology, clients, summary, judged, {"a.weight": 60, "b.weight": 100})
        )
    return compose(Found(runs))


def test_large_sets_stay_light(many):
    page = html.render(many)
    assert len(page.encode()) < 4_000_000
    assert all(len(series["points"]) <= 200 for figure in data_of(page).values() for series in figure.get("series", []))


def test_what_is_left_out_is_said(many):
    posteriors = [figure for figure in many.figures if "posterior" in figure.id]
    assert len(posteriors) == 12
    assert all("Shown for 6 of 100 settings" in figure.caption for figure in posteriors)
    (curves,) = [figure for figure in many.figures if figure.id.endswith("accuracy-rounds")]
    assert "more than 200 evaluated rounds are thinned evenly" in curves.caption


def test_run_folders_are_named_and_linked(tmp_path):
    """From the page and from report.md, relative to where they lie; whatever a folder is called."""
    name = "javascript:alert(1) & co"
    write(tmp_path / "runs" / name, [0.5] * 10)
    file, _ = report.write([tmp_path / "runs"], tmp_path / "out", pictures=False)
    ((address, words),) = re.findall(r'<a href="(\.\.[^"]*)"[^>]*>([^<]*)</a>', file.read_text("utf-8"))
    assert words == "javascript:alert(1) &amp; co"
    assert (file.parent / unquote(address)).resolve() == tmp_path / "runs" / name
    assert f"[{name}]({address})" in (tmp_path / "out" / "report.md").read_text("utf-8")
    assert str(tmp_path / "runs" / name) in (tmp_path / "out" / "report" / "digits-mlp-runs.csv").read_text("utf-8")


def test_ids_are_unique(tmp_path):
    for method in ("fedrts", "random", "fedavg"):
        write(tmp_path / method, [0.5] * 10, method=method)
    ids = re.findall(r' id="([^"]+)"', html.render(compose(find([tmp_path]))))
    assert sorted(ids) == sorted(set(ids))
