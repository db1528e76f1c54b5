import base64
import hashlib
import json
import re

import attrs
import pytest

from neuron_store.manifest.reader import Engine
from neuron_store.manifest.report import render_report
from neuron_store.manifest.schema import Config, Graph, Manifest
from tests.manifest import chromium, samples

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&{{data}}"


def browser():
    if chromium.PROGRAM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return chromium.Page


@pytest.fixture
def page_file(tmp_path):
    def write(engines, **options):
        path = tmp_path / "report.html"
        path.write_text(render_report(engines, **options), encoding="utf-8")
        return path

    return write


def with_holes(**options):
    return samples.engine(graphs=30, world=8, holes={3: (5,), 7: (5, 6)}, vanished=(9,), **options)


def data_of(page: str):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_asks_for_nothing_and_allows_only_its_own_script_and_style():
    page = render_report([with_holes()])
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    for tag in ("script", "style"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page


def test_text_from_a_manifest_is_never_markup():
    config = Config(model=EVIL, target=EVIL, neuron_config={EVIL: EVIL})
    evil = Manifest(
        config=config,
        graphs=(
            Graph(
                "k", input_shapes=(EVIL,), compiler_flags=EVIL, created_timestamp=EVIL, ranks=(0,)
            ),
        ),
        environment={EVIL: EVIL},
    )
    page = render_report([Engine(EVIL, samples.Path("m"), evil)], title=EVIL, footer=EVIL)
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert data_of(page)["flags"] == [EVIL]


def test_ten_thousand_graphs_stay_below_ten_megabytes():
    page = render_report([samples.engine(graphs=10_000, world=64, inputs=240)])
    assert len(page.encode()) < 10_000_000
    graphs = [
        Graph(f"{n:032x}", input_shapes=tuple(f"{n + i}, {i}" for i in range(300)), ranks=(0,))
        for n in range(10_000)
    ]
    worst = render_report([Engine("a", samples.Path("a"), Manifest(graphs=tuple(graphs)))])
    assert len(worst.encode()) < 10_000_000
    assert data_of(worst)["lists"][0][1] > 0


def test_an_empty_manifest_makes_a_page(page_file):
    with browser()() as page:
        page.open(page_file([Engine("a", samples.Path("a"), Manifest())]))
        assert "No graph was compiled" in page.run("document.body.innerText")
        assert page.errors == []


def test_a_browser_renders_sorts_filters_and_reports_no_error(page_file):
    with browser()() as page:
        page.open(page_file([with_holes()]))
        rows = "document.querySelectorAll('#t-graphs tbody tr').length"
        assert page.run(rows) == 30
        sizes = page.run(
            "[...document.querySelectorAll('#t-graphs tbody tr')].map(r => r.cells[1].textContent)"
        )
        assert sizes[-1] == "gone"
        page.run("document.querySelectorAll('#t-graphs th button')[0].click()")
        keys = page.run(
            "[...document.querySelectorAll('#t-graphs tbody tr')].map(r => r.cells[0].textContent)"
        )
        assert keys == sorted(keys)
        page.run("document.querySelectorAll('#t-graphs th button')[0].click()")
        assert page.run("document.querySelectorAll('#t-graphs th')[0].ariaSort") == "descending"
        first = page.run("document.querySelector('#t-graphs tbody tr').cells[0].textContent")
        assert first[:10] == max(keys)[:10]
        page.run(
            "(() => { const s = document.querySelector('#graphs input[type=search]');"
            "s.value = '-o1 16384]'; s.dispatchEvent(new Event('input')); })()"
        )
        assert 0 < page.run(rows) < 30
        assert "of 30 rows" in page.run("document.querySelector('#graphs .count').textContent")
        page.run("document.querySelector('#t-graphs tbody button').click()")
        assert "--auto-cast=none" in page.run("document.querySelector('tr.detail').textContent")
        assert page.errors == []
        assert page.requests == []


def test_holes_stand_out_and_are_read_with_the_keyboard(page_file):
    with browser()() as page:
        page.open(page_file([with_holes()]))
        assert page.run("document.querySelector('#coverage .bad').textContent").startswith(
            "2 of 30 graphs have holes"
        )
        page.run("document.querySelector('#coverage canvas').focus()")
        told = []
        for _ in range(7):
            page.key("ArrowRight")
            told.append(page.run("document.querySelector('.readout').textContent"))
        assert [n + 1 for n, text in enumerate(told) if "NOT traced" in text] == [5, 6]
        page.key("ArrowDown")
        assert "rank 7: traced" in page.run("document.querySelector('.readout').textContent")
        red = page.run(
            "(() => { const c = document.querySelector('#coverage canvas');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
            "for (let i = 0; i < d.length; i += 4) if (d[i] > 200 && d[i+1] < 80) n += 1;"
            "return n; })()"
        )
        assert red > 100
        assert page.errors == []


def test_a_rank_that_traced_nothing_is_told(page_file):
    engine = samples.engine(graphs=3, world=4)
    config = attrs.evolve(
        engine.manifest.config, topology=attrs.evolve(engine.manifest.config.topology, world_size=6)
    )
    engine = attrs.evolve(engine, manifest=attrs.evolve(engine.manifest, config=config))
    with browser()() as page:
        page.open(page_file([engine]))
        text = page.run("document.querySelector('#coverage .bad').textContent")
        assert "No graph at all from rank 4, rank 5" in text


def test_two_manifests_are_shown_side_by_side(page_file):
    before = samples.engine("dev0_7", graphs=5)
    after = attrs.evolve(
        before.manifest,
        graphs=before.manifest.graphs[1:],
        environment={**before.manifest.environment, "torch": "2.12.0"},
    )
    with browser()() as page:
        page.open(page_file([before, Engine("dev8_15", samples.Path("b"), after)]))
        text = page.run("document.querySelector('#t-diff').innerText")
        assert "graph gone" in text
        assert before.manifest.graphs[0].graph_hash in text
        assert "2.12.0" in text
        page.run(
            "(() => { const box = document.querySelector('#config input[type=checkbox]');"
            "box.click(); })()"
        )
        assert page.run("document.querySelectorAll('#t-config tbody tr').length") == 1
        assert page.errors == []


def test_hostile_text_does_nothing_in_a_browser(page_file):
    evil = Manifest(
        config=Config(model=EVIL, neuron_config={EVIL: EVIL}),
        graphs=(Graph("k", input_shapes=(EVIL,), compiler_flags=EVIL, ranks=(0,)),),
    )
    with browser()() as page:
        page.open(page_file([Engine(EVIL, samples.Path("m"), evil)]))
        assert page.run("document.title") != "owned"
        assert page.run("document.querySelectorAll('img').length") == 0
        page.run("document.querySelector('#t-graphs tbody button').click()")
        assert "onerror" in page.run("document.querySelector('tr.detail').textContent")
        assert page.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_system_and_can_be_switched(page_file, dark):
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser()(dark=dark) as page:
        page.open(page_file([with_holes()]))
        first = page.run(ground)
        assert (sum(map(int, re.findall(r"\d+", first))) < 200) is dark
        page.run("document.getElementById('theme').click()")
        assert (sum(map(int, re.findall(r"\d+", page.run(ground)))) < 200) is not dark


def test_a_phone_scrolls_the_page_in_one_direction_only(page_file):
    with browser()(width=390, height=800) as page:
        page.open(page_file([with_holes(), samples.engine("dev8_15", seed=1)]))
        assert page.run("document.documentElement.scrollWidth") == 390


def test_every_control_can_be_reached_and_has_a_name(page_file):
    with browser()() as page:
        page.open(page_file([with_holes()]))
        nameless = page.run(
            "[...document.querySelectorAll('button, input, canvas, a')].filter(e => !("
            "e.ariaLabel || e.textContent.trim() || (e.labels && e.labels.length))).length"
        )
        assert nameless == 0
        assert page.run("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0


def test_without_javascript_the_totals_are_there():
    page = render_report([with_holes()])
    assert "<dt>Graphs</dt><dd>30" in page
    assert "<noscript>" in page


@pytest.mark.slow
def test_ten_thousand_graphs_open_and_filter(page_file):
    with browser()() as page:
        page.open(page_file([samples.engine(graphs=10_000, world=64)]))
        count = page.run(
            "(() => { const s = document.querySelector('#graphs input[type=search]');"
            "s.value = 'ab'; s.dispatchEvent(new Event('input'));"
            "return document.querySelector('#graphs .count').textContent; })()"
        )
        assert "of 10000 rows" in count
        # What is drawn is what is looked at, not ten thousand rows.
        assert page.run("document.querySelectorAll('*').length") < 20_000
        assert page.errors == []
