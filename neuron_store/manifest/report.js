"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const content = document.getElementById("content");
  const PAGE = 100;

  // Text from a manifest only ever becomes text nodes and attribute values, never markup.
  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  };
  const svg = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const bytes = (n) => {
    if (n === null) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (n >= 1024 && unit < 4) { n /= 1024; unit += 1; }
    return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
  };
  const when = (text) => {
    if (!text) return "–";
    const told = text.replace("T", " ").replace(/(\.\d+)?(\+00:00|Z)$/, "");
    return told.length > 26 ? `${told.slice(0, 25)}…` : told;
  };
  const counted = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
  const ranges = (ranks) => {
    const parts = [];
    for (let i = 0; i < ranks.length; i += 1) {
      const first = ranks[i];
      while (i + 1 < ranks.length && ranks[i + 1] === ranks[i] + 1) i += 1;
      parts.push(first === ranks[i] ? `${first}` : `${first}–${ranks[i]}`);
    }
    return parts.join(", ") || "–";
  };
  const shapes = (list, limit) => {
    if (list === null) return "unknown";
    const [shown, left] = list;
    const parts = [];
    for (let i = 0; i < shown.length && parts.length < limit; i += 1) {
      let times = 1;
      while (i + 1 < shown.length && shown[i + 1] === shown[i]) { times += 1; i += 1; }
      const shape = `[${data.strings[shown[i]].replace(/,$/, "")}]`;
      parts.push(times > 1 ? `${shape} × ${times}` : shape);
      if (parts.length === limit && i + 1 < shown.length) parts.push("…");
    }
    return (parts.join(" ") || "none") + (left ? ` and ${left} more` : "");
  };
  const section = (id, title, ...children) => {
    const node = el("section", { id, "aria-labelledby": `h-${id}` }, el("h2", { id: `h-${id}` }, title), ...children);
    content.append(node);
    document.getElementById("sections").append(el("a", { href: `#${id}` }, title));
    return node;
  };

  // `[4, 2048]`, `[4,2048]` and `[4,]`, `[4]` are searched for as one.
  const plainShapes = (text) => text.replace(/,\s*(?=[\d?\]])/g, (_, at, all) => (all[at + 1] === "]" ? "" : ","));

  // -- a table that sorts, filters and shows its rows in pages -----------------------------------
  const table = ({ id, columns, rows, text, detail, sort, descending, placeholder, tools = [], rowClass, ask, api = {} }) => {
    const state = { sort, descending: Boolean(descending), query: "", shown: PAGE, extra: () => true };
    const body = el("tbody");
    const count = el("span", { class: "count", role: "status" });
    const more = el("button", { type: "button", class: "more", onclick: () => { state.shown += PAGE * 5; fill(false); } }, "Show more");
    const heads = columns.map((column, index) =>
      el("th", { scope: "col", class: column.number ? "num" : null },
        column.value
          ? el("button", { type: "button", onclick: () => {
              state.descending = state.sort === index ? !state.descending : Boolean(column.number);
              state.sort = index; state.shown = PAGE; apply();
            } }, column.title)
          : column.title));
    let visible = rows;
    const lines = new Map();
    const fill = (fresh) => {
      if (fresh) { body.replaceChildren(); lines.clear(); }
      for (let i = body.dataset.rows && !fresh ? Number(body.dataset.rows) : 0; i < Math.min(state.shown, visible.length); i += 1) {
        const row = visible[i];
        const line = el("tr", { class: rowClass ? rowClass(row) : null });
        lines.set(row, line);
        columns.forEach((column, index) => {
          const cell = el("td", { "data-label": column.title, class: [column.number ? "num" : "", column.class || ""].join(" ").trim() || null });
          const shown = column.show(row);
          if (index === 0 && detail) {
            const open = el("button", { type: "button", "aria-expanded": "false", onclick: () => {
              const opened = open.getAttribute("aria-expanded") === "true";
              open.setAttribute("aria-expanded", String(!opened));
              if (opened) line.nextSibling.remove();
              else line.after(el("tr", { class: "detail" }, el("td", { colspan: columns.length }, detail(row))));
            } }, shown);
            cell.append(open);
          } else cell.append(...(Array.isArray(shown) ? shown : [shown]));
          line.append(cell);
        });
        body.append(line);
      }
      body.dataset.rows = String(Math.min(state.shown, visible.length));
      if (visible.length === 0) body.append(el("tr", { class: "none" }, el("td", { colspan: columns.length }, state.query ? `Nothing matches “${state.query.trim()}”.` : "Nothing to show.")));
      count.textContent = visible.length === rows.length ? counted(rows.length, "row") : `${visible.length} of ${counted(rows.length, "row")}`;
      more.hidden = visible.length <= state.shown;
    };
    const apply = () => {
      const [query, keep] = ask ? ask(state.query) : [state.query, () => true];
      const words = plainShapes(query.toLowerCase()).split(/\s+/).filter(Boolean);
      visible = rows.filter((row) => state.extra(row) && keep(row) && words.every((word) => text(row).includes(word)));
      const column = columns[state.sort];
      if (column) {
        const turn = state.descending ? -1 : 1;
        visible = visible.map((row, at) => [column.value(row), at, row]).sort((a, b) => {
          if (a[0] === b[0]) return a[1] - b[1];
          if (a[0] === null) return 1;
          if (b[0] === null) return -1;
          return (a[0] < b[0] ? -1 : 1) * turn;
        }).map((entry) => entry[2]);
      }
      heads.forEach((head, index) => {
        if (index === state.sort) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      fill(true);
    };
    const search = el("input", { type: "search", "aria-label": placeholder, placeholder, oninput: () => { state.query = search.value; state.shown = PAGE; apply(); } });
    apply();
    // Shows a row whatever was searched for, opens it and goes there.
    api.reveal = (row) => {
      if (!visible.includes(row)) {
        search.value = ""; state.query = ""; state.extra = () => true;
        for (const box of bar.querySelectorAll("input[type=checkbox]")) box.checked = false;
        apply();
      }
      state.shown = Math.max(state.shown, visible.indexOf(row) + 1);
      fill(false);
      const open = lines.get(row).querySelector("button");
      if (open.getAttribute("aria-expanded") === "false") open.click();
      open.focus({ preventScroll: true });
      lines.get(row).scrollIntoView({ block: "center" });
    };
    const bar = el("div", { class: "tools" }, search, ...tools.map((tool) => tool(state, apply)), count);
    if ("IntersectionObserver" in window) {
      new IntersectionObserver((entries) => {
        if (!more.hidden && entries.some((entry) => entry.isIntersecting)) { state.shown += PAGE; fill(false); }
      }, { rootMargin: "200px" }).observe(more);
    }
    return [
      bar,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${placeholder}` }, el("table", { id: `t-${id}`, class: "rows" }, el("thead", {}, el("tr", {}, ...heads)), body)),
      more,
    ];
  };

  // -- graphs, decoded ---------------------------------------------------------------------------
  const graphs = data.graphs.map(([key, size, created, inputs, outputs, flags, placed, path], index) => ({
    index, key, size, created, path,
    inputs: data.lists[inputs], outputs: outputs === null ? null : data.lists[outputs],
    flags, placement: placed, placed: data.placements[placed],
  }));
  const flagText = (graph) => data.flags[graph.flags];
  const engineName = (at) => (data.engines.length > 1 ? `${data.engines[at].name} ` : "");
  const spread = (graph) => graph.placed.map(([engine, ranks]) => (data.engines.length > 1 ? `${data.engines[engine].name}: ` : "") + ranges(ranks)).join("; ");
  // Many short ranges make the column wider than all others together.
  const few = (text, ranks) => (text.length <= 40 ? text : `${text.slice(0, 30).replace(/[,;]?[^,;]*$/, "")}, … (${counted(ranks, "rank")})`);
  const rankCount = (graph) => graph.placed.reduce((sum, [, ranks]) => sum + ranks.length, 0);
  const haystacks = new Map();
  const haystack = (graph) => {
    if (!haystacks.has(graph)) {
      const lists = [graph.inputs, graph.outputs].filter(Boolean).map((list) => list[0].map((at) => plainShapes(`[${data.strings[at]}]`)).join(" "));
      haystacks.set(graph, [graph.key, graph.path || "", graph.created || "", when(graph.created), ...lists, flagText(graph), ...graph.placed.map(([engine]) => data.engines[engine].name)].join(" ").toLowerCase());
    }
    return haystacks.get(graph);
  };
  // `rank 33` and the chips `F1` are more than text: rank 3 is no part of rank 33.
  const askGraphs = (query) => {
    const tests = [];
    const rest = query.replace(/\branks?[\s:=]*(\d+)\b/gi, (_, rank) => {
      tests.push((graph) => graph.placed.some(([, ranks]) => ranks.includes(Number(rank))));
      return " ";
    }).replace(/(^|\s)F(\d+)(?=\s|$)/g, (_, before, set) => {
      tests.push((graph) => graph.flags + 1 === Number(set));
      return before;
    });
    return [rest, (graph) => tests.every((test) => test(graph))];
  };
  const facts = (pairs) => el("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, el("code", {}, value))]));

  // -- engines -----------------------------------------------------------------------------------
  if (data.engines.length > 1) {
    section("engines", "Engines", el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ...["Engine", "Model", "Target", "World size", "Graphs", "Ranks that traced", "Executables"].map((title, i) => el("th", { scope: "col", class: [3, 4, 6].includes(i) ? "num" : null }, title)))),
      el("tbody", {}, ...data.engines.map((engine) => el("tr", {},
        el("td", { class: "mono" }, engine.name), el("td", {}, engine.model || "–"), el("td", {}, engine.target || "–"),
        el("td", { class: "num" }, String(engine.world ?? "–")), el("td", { class: "num" }, String(engine.graphs)),
        el("td", {}, ranges(engine.ranks)), el("td", { class: "num" }, bytes(engine.bytes))))))));
  }

  // -- the difference of two manifests -----------------------------------------------------------
  if (data.diff) {
    const { rows, names, counts } = data.diff;
    const told = rows.length === 0
      ? [el("p", { class: "good" }, "The two manifests say the same.")]
      : [el("p", { class: "note" }, counts), ...table({
          id: "diff", rows, placeholder: "Search the differences", sort: null,
          text: (row) => row.join(" ").toLowerCase(),
          columns: [
            { title: "What", value: (r) => r[0], show: (r) => [el("span", { class: `chip ${r[0].split(" ").pop()}` }, r[0])] },
            { title: "Where", class: "path", value: (r) => r[1], show: (r) => [el("code", {}, r[1])] },
            { title: names[0], class: "value", show: (r) => (r[2] === null ? "" : [el("code", { class: "old" }, r[2])]) },
            { title: names[1], class: "value", show: (r) => (r[3] === null ? "" : [el("code", { class: "new" }, r[3])]) },
          ],
        })];
    section("diff", `Differences: ${names[0]} → ${names[1]}`, ...told);
  }

  // -- sizes and times ---------------------------------------------------------------------------
  const sized = graphs.filter((graph) => graph.size !== null);
  const timed = graphs.map((graph) => [Date.parse(graph.created), graph]).filter(([at]) => !Number.isNaN(at)).sort((a, b) => a[0] - b[0]);
  const largest = [...sized].sort((a, b) => b.size - a.size).slice(0, 12);
  const bars = el("div", { class: "bars", role: "list", "aria-label": "Largest executables" });
  for (const graph of largest) {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${Math.max(1, (100 * graph.size) / largest[0].size)}%`;
    bars.append(el("code", { role: "listitem", title: graph.key }, graph.key.slice(0, 12)), el("span", { title: shapes(graph.inputs, 6) }, bar), el("span", { class: "size" }, bytes(graph.size)));
  }
  const timeline = () => {
    const [w, h, left, bottom, top] = [560, 250, 58, 26, 12];
    const [first, last] = [timed[0][0], timed[timed.length - 1][0]];
    const most = Math.max(1, ...timed.map(([, graph]) => graph.size || 0));
    const x = (at) => left + ((w - left - 14) * (at - first)) / Math.max(1, last - first);
    const y = (size) => h - bottom - ((h - bottom - top) * size) / most;
    const chart = svg("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `Executables by compile time, from ${when(timed[0][1].created)} to ${when(timed[timed.length - 1][1].created)} UTC` });
    for (const part of [0, 0.5, 1]) {
      chart.append(svg("line", { class: "axis", x1: left, x2: w - 8, y1: y(most * part), y2: y(most * part) }), svg("text", { x: left - 8, y: y(most * part) + 4, "text-anchor": "end" }, bytes(Math.round(most * part))));
    }
    const step = Math.max(1, Math.ceil(timed.length / 3000));
    timed.forEach(([at, graph], index) => {
      if (index % step) return;
      chart.append(svg("circle", { class: "dot", cx: x(at).toFixed(1), cy: y(graph.size || 0).toFixed(1), r: timed.length > 400 ? 2.5 : 4 }, svg("title", {}, `${graph.key.slice(0, 12)}: ${bytes(graph.size)}, ${when(graph.created)}`)));
    });
    chart.append(svg("text", { x: left, y: h - 8 }, when(timed[0][1].created)), svg("text", { x: w - 8, y: h - 8, "text-anchor": "end" }, when(timed[timed.length - 1][1].created)));
    return chart;
  };
  section("sizes", "Size and compile time", el("div", { class: "charts" },
    el("div", {}, el("h3", {}, "Largest executables"), largest.length ? bars : el("p", { class: "note" }, "No executable's size is known.")),
    el("div", {}, el("h3", {}, "When they were compiled (UTC), by size"), timed.length ? timeline() : el("p", { class: "note" }, "No compile time is known."))));

  // -- coverage ----------------------------------------------------------------------------------
  const graphTable = {};
  const columns = data.columns; // [engine, rank]
  const columnAt = new Map(columns.map(([engine, rank], at) => [`${engine}/${rank}`, at]));
  const unseen = new Set(data.unseen);
  const holeAt = data.holes.map((places) => places.flatMap(([engine, ranks]) => ranks.map((rank) => columnAt.get(`${engine}/${rank}`))));
  const covered = graphs.map((graph) => {
    const traced = new Set();
    for (const [engine, ranks] of graph.placed) for (const rank of ranks) traced.add(columnAt.get(`${engine}/${rank}`));
    return { graph, traced, holes: holeAt[graph.placement] };
  });
  const group = data.engines.some((engine) => engine.stages > 1) ? "pipeline stage" : "engine";
  const order = [...covered].sort((a, b) => b.holes.length - a.holes.length || a.graph.index - b.graph.index);
  const coverage = () => {
    const rowHeight = 16; const label = 112; const head = 34;
    const canvas = el("canvas", { tabindex: "0", role: "img" });
    const space = el("div", { class: "space" });
    const frame = el("div", { class: "matrix" }, canvas, space);
    const readout = el("p", { class: "readout", role: "status" }, "Point at a cell, or move with the arrow keys, to see its graph and rank; click, or Enter, leads to the graph.");
    const holes = order.filter((row) => row.holes.length).length;
    canvas.setAttribute("aria-label", `Coverage of ${counted(order.length, "graph")} by ${counted(columns.length, "rank")}; ${holes} with holes. Use the arrow keys to read cells, Enter to see the graph.`);
    const cursor = { row: 0, column: 0, shown: false };
    let cell = 10; let pending = false;
    const layout = () => {
      const width = frame.clientWidth;
      cell = Math.max(9, Math.min(26, (width - label - 8) / Math.max(1, columns.length)));
      space.style.width = `${label + cell * columns.length + 4}px`;
      space.style.height = `${head + rowHeight * order.length + 4}px`;
      const height = Math.min(head + rowHeight * order.length + 4, Math.min(600, Math.round(window.innerHeight * 0.6)));
      frame.style.height = `${height + 2}px`;
      const scale = window.devicePixelRatio || 1;
      canvas.width = Math.max(1, Math.round(frame.clientWidth * scale)); canvas.height = Math.max(1, Math.round(frame.clientHeight * scale));
      canvas.style.width = `${frame.clientWidth}px`; canvas.style.height = `${frame.clientHeight}px`;
      draw();
    };
    const draw = () => {
      pending = false;
      const style = getComputedStyle(document.documentElement);
      const color = (name) => style.getPropertyValue(name).trim();
      const [on, off, hole, silent, ink, soft, card] = ["--traced", "--blank", "--hole", "--silent", "--ink", "--soft", "--card"].map(color);
      const scale = window.devicePixelRatio || 1; const pen = canvas.getContext("2d");
      const [w, h] = [canvas.width / scale, canvas.height / scale];
      pen.setTransform(scale, 0, 0, scale, 0, 0); pen.fillStyle = card; pen.fillRect(0, 0, w, h);
      const [sx, sy] = [frame.scrollLeft, frame.scrollTop];
      const from = Math.max(0, Math.floor((sy - head) / rowHeight)); const to = Math.min(order.length, Math.ceil((sy + h - head) / rowHeight) + 1);
      pen.font = "11px ui-monospace, Menlo, Consolas, monospace"; pen.textBaseline = "middle";
      for (let row = from; row < to; row += 1) {
        const { traced, holes: missing } = order[row]; const lost = new Set(missing); const top = head + row * rowHeight - sy;
        for (let at = 0; at < columns.length; at += 1) {
          const x = label + at * cell - sx;
          if (x + cell < label || x > w) continue;
          pen.fillStyle = traced.has(at) ? on : lost.has(at) ? hole : unseen.has(at) ? silent : off;
          pen.fillRect(x, top + 1, cell - (cell > 6 ? 1.5 : 0.5), rowHeight - 2);
          if (cursor.shown && cursor.row === row && cursor.column === at) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(x - 0.5, top, cell - 0.5, rowHeight - 1); }
        }
      }
      pen.fillStyle = card; pen.fillRect(0, 0, label - 2, h);
      for (let row = from; row < to; row += 1) {
        pen.fillStyle = order[row].holes.length ? hole : soft; pen.textAlign = "left";
        pen.fillText(order[row].graph.key.slice(0, 14), 6, head + row * rowHeight - sy + rowHeight / 2);
      }
      pen.fillStyle = card; pen.fillRect(0, 0, w, head - 1);
      pen.textAlign = "center"; pen.font = "10px system-ui, sans-serif";
      const widest = String(columns.reduce((most, [, rank]) => Math.max(most, rank), 0)).length * 6.5 + 6;
      const every = Math.max(1, Math.ceil(widest / cell));
      let since = 0;
      columns.forEach(([engine, rank], at) => {
        const x = label + at * cell - sx;
        since = at === 0 || columns[at - 1][0] !== engine ? 0 : since + 1;
        if (x < label - 2 || x > w) return;
        const start = since === 0;
        if (start && data.engines.length > 1) { pen.fillStyle = ink; pen.textAlign = "left"; pen.fillText(data.engines[engine].name.slice(0, 24), x, 9); pen.textAlign = "center"; }
        if (since % every === 0) { pen.fillStyle = unseen.has(at) ? hole : soft; pen.fillText(String(rank), x + cell / 2 - 1, 24); }
      });
      pen.fillStyle = card; pen.fillRect(0, 0, label - 2, head - 1); pen.fillStyle = soft; pen.textAlign = "left"; pen.fillText("graph \\ rank", 6, 24);
    };
    const soon = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };
    const tell = () => {
      const entry = order[cursor.row]; const column = columns[cursor.column];
      if (!entry || !column) return;
      const state = entry.traced.has(cursor.column) ? "traced" : entry.holes.includes(cursor.column) ? "NOT traced: a hole" : unseen.has(cursor.column) ? "this rank traced nothing at all" : `not traced, as by most of its ${group}`;
      readout.textContent = `Graph ${entry.graph.key}, ${data.engines.length > 1 ? data.engines[column[0]].name + ", " : ""}rank ${column[1]}: ${state}. ${shapes(entry.graph.inputs, 6)}`;
    };
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left - label + frame.scrollLeft) / cell);
      const row = Math.floor((event.clientY - box.top - head + frame.scrollTop) / rowHeight);
      if (row < 0 || row >= order.length || column < 0 || column >= columns.length) return;
      Object.assign(cursor, { row, column, shown: true }); tell(); soon();
    };
    const reveal = () => { if (order[cursor.row]) graphTable.reveal(order[cursor.row].graph); };
    let tapped = -1;
    canvas.addEventListener("mousemove", point);
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top - head + frame.scrollTop) / rowHeight);
      if (row < 0 || row >= order.length) return;
      point(event);
      cursor.row = row;
      // A finger cannot point without touching: its first tap reads the cell.
      if (event.pointerType === "touch" && tapped !== row && event.clientX - box.left > label) { tapped = row; return; }
      reveal();
    });
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); reveal(); return; }
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0], Home: [-order.length, 0], End: [order.length, 0] };
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      cursor.row = Math.max(0, Math.min(order.length - 1, cursor.row + move[0])); cursor.column = Math.max(0, Math.min(columns.length - 1, cursor.column + move[1])); cursor.shown = true;
      const [x, y] = [label + cursor.column * cell, head + cursor.row * rowHeight];
      if (y - frame.scrollTop < head) frame.scrollTop = y - head;
      if (y + rowHeight > frame.scrollTop + frame.clientHeight) frame.scrollTop = y + rowHeight - frame.clientHeight;
      if (x - frame.scrollLeft < label) frame.scrollLeft = x - label;
      if (x + cell > frame.scrollLeft + frame.clientWidth) frame.scrollLeft = x + cell - frame.clientWidth;
      tell(); soon();
    });
    frame.addEventListener("scroll", soon, { passive: true });
    new ResizeObserver(() => requestAnimationFrame(layout)).observe(frame.parentElement || frame);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
    document.addEventListener("themechange", soon);
    return { frame, readout, layout, holes };
  };
  if (graphs.length && columns.length) {
    const view = coverage();
    const silent = data.engines.map((engine, at) => [at, data.unseen.filter((column) => columns[column][0] === at).map((column) => columns[column][1])])
      .filter(([, ranks]) => ranks.length)
      .map(([at, ranks]) => `${engineName(at)}${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks)}${data.engines[at].undrawn ? ` and ${data.engines[at].undrawn} more` : ""}`);
    const told = [
      view.holes ? `${view.holes} of ${counted(graphs.length, "graph")} ${view.holes === 1 ? "has" : "have"} holes: ranks that did not trace what most of their ${group} did.` : "",
      silent.length ? `No graph at all from ${silent.slice(0, 8).join("; ")}${silent.length > 8 ? " and others" : ""}.` : "",
    ].filter(Boolean).join(" ");
    section("coverage", "Coverage: which rank traced which graph",
      told ? el("p", { class: "bad" }, told) : el("p", { class: "note" }, `No holes: every rank traced what most of its ${group} did.`),
      el("ul", { class: "legend" }, ...[["traced", "traced"], ["hole", "hole"], silent.length ? ["silent", "a rank that traced nothing"] : null, ["blank", "not this rank's"]].filter(Boolean).map(([kind, text]) => el("li", {}, el("i", { class: kind }), text))),
      view.frame, view.readout);
    view.layout();
  }

  // -- graphs ------------------------------------------------------------------------------------
  const holesOf = new Map(covered.map((entry) => [entry.graph, entry.holes.length]));
  section("graphs", "Graphs", ...(graphs.length ? table({
    id: "graphs", rows: graphs, text: haystack, ask: askGraphs, api: graphTable, sort: 1, descending: true, placeholder: "Search hash, shape, flag, F1, rank 3, engine",
    tools: [(state, apply) => el("label", {}, el("input", { type: "checkbox", onchange: (event) => { state.extra = event.target.checked ? (graph) => holesOf.get(graph) > 0 || graph.size === null : () => true; apply(); } }), " only with holes or without an executable")],
    rowClass: (graph) => (holesOf.get(graph) > 0 || graph.size === null ? "differs" : null),
    columns: [
      { title: "Graph", class: "key", value: (g) => g.key, show: (g) => (g.key.length > 18 ? `${g.key.slice(0, 16)}…` : g.key) },
      { title: "Size", number: true, value: (g) => g.size, show: (g) => (g.size === null ? [el("span", { class: "bad" }, "gone")] : bytes(g.size)) },
      { title: "Compiled (UTC)", class: "time", value: (g) => g.created, show: (g) => [el("span", { title: g.created }, when(g.created))] },
      { title: "Inputs", value: (g) => (g.inputs[0].length + g.inputs[1]), show: (g) => [el("code", {}, shapes(g.inputs, 3))] },
      { title: "Outputs", value: (g) => (g.outputs === null ? null : g.outputs[0].length + g.outputs[1]), show: (g) => [el("code", {}, shapes(g.outputs, 3))] },
      { title: "Ranks", class: "ranks", value: rankCount, show: (g) => [el("span", { title: spread(g).length > 40 ? spread(g).slice(0, 400) : null }, few(spread(g), rankCount(g)))] },
      { title: "Flags", value: (g) => g.flags, show: (g) => [el("span", { class: "chip", title: flagText(g) }, `F${g.flags + 1}`)] },
    ],
    detail: (g) => facts([["Graph", g.key], ["Executable", g.path === null ? "gone from the store" : g.path], ["Size", g.size === null ? "unknown" : counted(g.size, "byte")], ["Compiled", g.created || "unknown"], ["Inputs", shapes(g.inputs, Infinity)], ["Outputs", shapes(g.outputs, Infinity)], ["Ranks", spread(g)], [`Flags F${g.flags + 1}`, flagText(g) || "none"]]),
  }) : [el("p", { class: "note" }, "No graph was compiled.")]));

  // -- flags -------------------------------------------------------------------------------------
  if (data.flags.length) {
    const uses = data.flags.map(() => 0);
    for (const graph of graphs) uses[graph.flags] += 1;
    section("flags", "Compiler flags", el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Set"), el("th", { scope: "col", class: "num" }, "Graphs"), el("th", { scope: "col" }, "Flags"))),
      el("tbody", {}, ...data.flags.slice(0, 200).map((text, at) => el("tr", {}, el("td", {}, el("span", { class: "chip" }, `F${at + 1}`)), el("td", { class: "num" }, String(uses[at])), el("td", {}, el("code", {}, text || "none"))))))));
  }

  // -- configuration -----------------------------------------------------------------------------
  section("config", "Configuration and environment", ...table({
    id: "config", rows: data.config, sort: 0, placeholder: "Search settings and packages",
    text: (row) => row.searched || (row.searched = `${row[0]} ${row[1]} ${row[2].map((other) => other[1]).join(" ")}`.toLowerCase()),
    tools: data.engines.length > 1 ? [(state, apply) => el("label", {}, el("input", { type: "checkbox", onchange: (event) => { state.extra = event.target.checked ? (row) => row[2].length > 0 : () => true; apply(); } }), " only where engines differ")] : [],
    rowClass: (row) => (row[2].length ? "differs" : null),
    columns: [
      { title: "Setting", class: "path", value: (row) => row[0], show: (row) => [el("code", {}, row[0])] },
      { title: "Value", class: "value", value: (row) => row[1], show: (row) => [el("code", {}, row[1] ?? "(absent)"), ...row[2].map(([engine, value]) => el("div", {}, el("span", { class: "chip changed" }, data.engines[engine].name), " ", el("code", {}, value ?? "(absent)")))] },
    ],
  }));

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.dispatchEvent(new Event("themechange"));
  });
  document.documentElement.dataset.ready = "yes";
})();
