import base64
import hashlib
import json
import re

import attrs
import pytest

from neuron_store.manifest.coverage import Coverage
from neuron_store.manifest.reader import Engine
from neuron_store.manifest.report import render_report
from neuron_store.manifest.schema import Config, Graph, Manifest, Topology
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
        assert text == "No graph at all from ranks 4\u20135."
        page.run("document.querySelector('#coverage canvas').focus()")
        for _ in range(4):
            page.key("ArrowRight")
        assert "traced nothing at all" in page.run("document.querySelector('.readout').textContent")
        assert page.errors == []


def test_ranks_beyond_what_can_be_drawn_are_counted(page_file):
    engine = with_topology(samples.engine(graphs=1, world=4), world_size=2_000_000_000)
    page = render_report([engine])
    assert "4 of 2,000,000,000" in page
    assert data_of(page)["engines"][0]["undrawn"] == 2_000_000_000 - 4096
    assert len(page) < 200_000


def with_topology(engine, **sizes):
    manifest = engine.manifest
    topology = attrs.evolve(manifest.config.topology, **sizes)
    config = attrs.evolve(manifest.config, topology=topology)
    return attrs.evolve(engine, manifest=attrs.evolve(manifest, config=config))


def traced_by(*ranks_of_graphs, **sizes):
    graphs = tuple(Graph(f"k{n}", ranks=tuple(r)) for n, r in enumerate(ranks_of_graphs))
    config = Config(topology=Topology(**sizes))
    return Manifest(config=config, graphs=graphs)


def holes(manifest):
    coverage = Coverage.of(manifest)
    return [coverage.holes(graph.ranks) for graph in manifest.graphs]


def test_the_other_pipeline_stage_is_no_hole():
    first, second = range(32), range(32, 64)
    sizes = {"world_size": 64, "tensor_parallel_size": 32, "pipeline_parallel_size": 2}
    assert holes(traced_by(first, second, range(64), **sizes)) == [(), (), ()]
    lost = [r for r in second if r != 40]
    assert holes(traced_by(first, lost, second, **sizes)) == [(), (40,), ()]
    both = [r for r in range(64) if r not in {3, 50}]
    assert holes(traced_by(range(64), both, **sizes)) == [(), (3, 50)]


def test_stages_of_data_parallel_replicas_and_of_wider_stages_are_told_apart():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    manifest = traced_by([0, 1, 4, 5], [2, 3, 6], [2, 3, 6, 7], world_size=8, **sizes)
    assert holes(manifest) == [(), (7,), ()]
    # Prefill context parallelism makes a stage wider than the tensor's degree.
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "world_size": 16}
    assert holes(traced_by(range(8), range(8, 15), range(8, 16), **sizes)) == [(), (15,), ()]


def test_without_stages_a_strict_majority_of_those_that_traced_decides():
    half, most = range(4), [0, 1, 2, 3, 4]
    assert holes(traced_by(range(8), half, most, [5])) == [(), (), (5, 6, 7), ()]


def test_holes_do_not_depend_on_how_many_ranks_traced_nothing():
    live = range(64)
    lost = [r for r in live if r != 9]
    for world in (64, 128, 4096):
        assert holes(traced_by(live, lost, world_size=world)) == [(), (9,)]


def test_a_pipeline_has_no_holes_and_a_half_dead_engine_shows_its_own(page_file):
    sizes = {"world_size": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    pipeline = traced_by(*([range(4), range(4, 8)] * 5), **sizes)
    live = [r for r in range(8) if r != 3]
    half = traced_by(range(8), live, world_size=20)
    with browser()() as page:
        page.open(page_file([Engine("pp2", samples.Path("a"), pipeline)]))
        assert page.run("document.querySelector('#coverage .bad')") is None
        told = page.run("document.querySelector('#coverage .note').textContent")
        assert told.startswith("No holes: every rank traced what most of its pipeline stage did")
        page.open(page_file([Engine("half", samples.Path("a"), half)]))
        told = page.run("document.querySelector('#coverage .bad').textContent")
        assert told.startswith("1 of 2 graphs has holes: ")
        assert told.endswith("No graph at all from ranks 8\u201319.")


def search(page, text):
    page.run(
        "(() => { const s = document.querySelector('#graphs input[type=search]');"
        f"s.value = {text!r}; s.dispatchEvent(new Event('input')); }})()"
    )
    return page.run(
        "[...document.querySelectorAll('#t-graphs tbody tr:not(.none)')].map("
        "r => r.cells[0].textContent)"
    )


def test_what_is_shown_is_found_shapes_ranks_and_chips(page_file):
    graphs = (
        Graph("a", input_shapes=("4,", "4, 2048"), compiler_flags="--x", ranks=(0, 33)),
        Graph("b", input_shapes=("14,",), compiler_flags="--y", ranks=(3,)),
    )
    with browser()() as page:
        page.open(page_file([Engine("e", samples.Path("a"), Manifest(graphs=graphs))]))
        for text in ("[4]", "[4,]", "[4, 2048]", "4,2048", "F1", "rank 33", "[4] rank 0 F1", "--x"):
            assert search(page, text) == ["a"], text
        for text in ("F2", "rank 3", "ranks 3", "[14]"):
            assert search(page, text) == ["b"], text
        assert search(page, "zzz") == []
        shown = page.run("document.querySelector('#t-graphs tbody').innerText")
        assert "Nothing matches “zzz”." in shown
        assert len(search(page, "")) == 2
        assert page.errors == []


def test_a_row_of_the_matrix_leads_to_its_graph(page_file):
    with browser()() as page:
        page.open(page_file([with_holes()]))
        search(page, "zzz")
        page.run("document.querySelector('#coverage canvas').focus()")
        page.key("ArrowDown")
        page.key("Enter")
        told = page.run("document.querySelector('.readout').textContent")
        opened = "document.querySelector('tr.detail').textContent"
        key = re.search("[0-9a-f]{32}", told)[0]
        assert key in page.run(opened)
        assert page.run("document.activeElement.closest('tr').nextSibling.className") == "detail"
        page.run(
            "document.querySelector('tr.detail').previousSibling.querySelector('button').click()"
        )
        page.run(
            "(() => { const c = document.querySelector('#coverage canvas');"
            "c.scrollIntoView(); const b = c.getBoundingClientRect();"
            "c.dispatchEvent(new PointerEvent('click', {clientX: b.left + 20,"
            " clientY: b.top + 34 + 16 + 5, pointerType: 'mouse'})); })()"
        )
        assert key in page.run(opened)
        assert page.errors == []


def test_long_rows_and_times_do_not_squeeze_the_others(page_file):
    odd = tuple(range(0, 128, 2))
    graphs = (
        Graph("a", input_shapes=("4, 2048",) * 3, ranks=odd, created_timestamp="9" * 200),
        Graph("b", input_shapes=("4, 2048",), ranks=(0, 1)),
    )
    with browser()() as page:
        page.open(page_file([Engine("e", samples.Path("a"), Manifest(graphs=graphs))]))
        widths = page.run(
            "[...document.querySelectorAll('#t-graphs thead th')].map(h => h.offsetWidth)"
        )
        assert widths[5] < 400
        assert widths[2] < 280
        cells = page.run("document.querySelector('#t-graphs tbody tr').innerText")
        assert "(64 ranks)" in page.run("document.querySelector('#t-graphs tbody').innerText")
        assert "9" * 27 not in cells


def test_on_a_phone_a_row_is_a_card_with_its_labels(page_file):
    with browser()(width=390, height=800) as page:
        page.open(page_file([with_holes()]))
        table = "document.querySelector('#t-graphs')"
        assert page.run(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")
        label = page.run(
            f"getComputedStyle({table}.querySelectorAll('tbody td')[1], '::before').content"
        )
        assert label == '"Size"'


def test_the_totals_of_two_manifests_stand_side_by_side():
    before = samples.engine("before", graphs=5)
    after = samples.engine("after", graphs=4, vanished=(0,))
    page = render_report([before, after])
    assert "<span><small>before</small>5</span><span><small>after</small>4</span>" in page
    assert "<span><small>before</small>8 of 8</span><span><small>after</small>8 of 8</span>" in page
    assert "<span><small>before</small>0</span><span><small>after</small>1</span>" in page
    merged = render_report([before, after, samples.engine("third", graphs=1, seed=9)])
    assert "<dt>Graphs</dt><dd>6" in merged


def test_one_is_told_in_the_singular():
    one = samples.engine(graphs=1, world=1)
    page = render_report([one])
    assert "1 set of flags" in page
    other = attrs.evolve(one.manifest, environment={**one.manifest.environment, "torch": "3"})
    assert "0 settings and 1 package differs." in render_report(
        [one, Engine("b", samples.Path("b"), other)]
    )


def test_a_page_with_everything_reports_no_error(page_file):
    with browser()() as page:
        page.open(page_file([with_holes(), samples.engine("b", seed=1, world=3)]))


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
