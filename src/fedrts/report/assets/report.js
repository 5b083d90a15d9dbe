// Charts as SVG, drawn from the JSON in this page; tables that sort. No library, no network.
(() => {
  "use strict";

  const FIGURES = JSON.parse(document.getElementById("figures").textContent);
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "14 4"];
  const HUES = 8;
  const MOST_ROWS = 2000;

  // -- numbers ------------------------------------------------------------------------------------------------------

  const digits = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));

  const scaled = (value, names) => {
    let power = 0;
    while (Math.abs(value) >= 999.5 && power < names.length - 1) { value /= 1000; power += 1; }
    return `${digits(value)} ${names[power]}`.trim();
  };

  const FORMATS = {
    percent: (value) => `${(100 * value).toFixed(1)} %`,
    bytes: (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]),
    flops: (value) => scaled(value, ["", "k", "M", "G", "T", "P", "E", "Z"]),
    integer: (value) => Math.round(value).toLocaleString("en"),
    seconds: (value) => `${value.toFixed(1)} s`,
    number: (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)))),
  };

  const text = (value, format) => (value === null ? "–" : (FORMATS[format] || String)(value));

  /** The same, with fewer digits: for the ticks of an axis. */
  const tick = (value, format, step) => {
    if (format === "percent") return `${Number((100 * value).toFixed(step < 0.01 ? 1 : 0))} %`;
    if (format === "bytes" || format === "flops") return text(value, format).replace(/\.0+(?=\s|$)|(\.\d*?)0+(?=\s|$)/, "$1");
    return text(value, format);
  };

  const steps = (low, high, count, whole) => {
    const raw = (high - low) / Math.max(count, 1) || 1;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max((whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((m) => m * unit >= raw) * unit, whole ? 1 : 0);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
    return [found, step];
  };

  const logSteps = (low, high, count) => {
    for (const wanted of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
        for (const m of wanted) if (m * 10 ** power >= low * 0.999 && m * 10 ** power <= high * 1.001) found.push(Number((m * 10 ** power).toPrecision(3)));
      if (found.length <= count && found.length > 1) return [found, low / 10];
    }
    return [[low, high], low / 10];
  };

  /** From values to pixels, with ticks. */
  const scale = (axis, values, from, to, count) => {
    let low = Math.min(...values), high = Math.max(...values);
    const log = axis.scale === "log" && low > 0;
    if (axis.zero && !log) low = Math.min(low, 0);
    if (low === high) { low = log ? low / 2 : low - (Math.abs(low) || 1) * 0.05; high = log ? high * 2 : high + (Math.abs(high) || 1) * 0.05; }
    if (axis.padded) {
      const pad = log ? 0 : 0.05 * (high - low);
      low = axis.zero ? low : low - pad; high += pad;
      if (log) { low /= 1.1; high *= 1.1; }
    }
    const [marks, step] = log ? logSteps(low, high, count) : steps(low, high, count, axis.format === "integer");
    const map = log ? (v) => from + ((Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from) : (v) => from + ((v - low) / (high - low)) * (to - from);
    return { map, marks, step };
  };

  // -- drawing ------------------------------------------------------------------------------------------------------

  const make = (name, attributes = {}, parent = null, content = null) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (content !== null) node.textContent = content;
    if (parent) parent.append(node);
    return node;
  };

  const element = (name, attributes = {}, parent = null, content = null) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (content !== null) node.textContent = content;
    if (parent) parent.append(node);
    return node;
  };

  const measure = document.createElement("canvas").getContext("2d");
  const widthOf = (content, size = 12, weight = "") => {
    measure.font = `${weight} ${size}px system-ui, sans-serif`;
    return measure.measureText(content).width;
  };
  const cut = (content, width) => {
    if (widthOf(content) <= width) return content;
    let kept = content;
    while (kept.length > 1 && widthOf(`${kept}…`) > width) kept = kept.slice(0, -1);
    return `${kept}…`;
  };

  const hue = (index) => `--hue: var(--hue${index % HUES})`;

  /** A marker by number: circle, square, triangle, diamond, cross, plus, triangle down, bar. */
  const mark = (index, x, y, parent, r = 3.6) => {
    const shapes = [
      `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
      `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
      `M${x},${y - r * 1.2}l${r * 1.15},${r * 2}h${-2.3 * r}z`,
      `M${x},${y - r * 1.35}l${r * 1.35},${r * 1.35}l${-r * 1.35},${r * 1.35}l${-r * 1.35},${-r * 1.35}z`,
      `M${x - r},${y - r}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`,
      `M${x},${y - r * 1.2}v${2.4 * r}m${-1.2 * r},${-1.2 * r}h${2.4 * r}`,
      `M${x},${y + r * 1.2}l${r * 1.15},${-r * 2}h${-2.3 * r}z`,
      `M${x - r * 0.5},${y - r * 1.2}h${r}v${2.4 * r}h${-r}z`,
    ];
    return make("path", { d: shapes[index % shapes.length], class: "mark" }, parent);
  };

  const axes = (root, figure, x, y, box, width, height) => {
    for (const value of y.marks) {
      const at = y.map(value);
      make("line", { class: "gridline", x1: box.left, x2: box.right, y1: at, y2: at }, root);
      make("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, root, tick(value, figure.y.format, y.step));
    }
    for (const value of x.marks) {
      const at = x.map(value);
      make("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }, root);
      make("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, root, tick(value, figure.x.format, x.step));
    }
    make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
    make("text", { class: "title", x: box.right, y: height - 4, "text-anchor": "end" }, root, figure.x.title);
    make("text", { class: "title", x: 0, y: 11 }, root, figure.y.title);
  };

  const drawLines = (figure, width, hidden) => {
    const shown = figure.series.map((series, index) => ({ ...series, index })).filter((s) => !hidden.has(s.index) && s.points.length);
    const height = Math.round(Math.min(360, Math.max(230, width * 0.6)));
    const root = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const points = shown.flatMap((s) => s.points);
    const named = shown.length <= 6 && width >= 420;
    const room = named ? Math.min(130, Math.max(0, ...shown.map((s) => widthOf(s.name, 12, "600"))) + 14) : 10;
    const ys = points.flatMap(([, y, e]) => [y - (e || 0), y + (e || 0)]).concat(figure.references.map(([, y]) => y));
    const probe = scale({ ...figure.y, padded: true }, ys.length ? ys : [0, 1], 1, 0, 5);
    const left = Math.max(...probe.marks.map((v) => widthOf(tick(v, figure.y.format, probe.step)))) + 12;
    const box = { left, right: width - room, top: 22, bottom: height - 38 };
    const count = Math.max(2, Math.floor((box.right - box.left) / 75));
    const x = scale({ ...figure.x, padded: figure.whiskers }, points.length ? points.map((p) => p[0]) : [0, 1], box.left + 4, box.right - 4, count);
    const y = scale({ ...figure.y, padded: true }, ys.length ? ys : [0, 1], box.bottom, box.top, 5);
    axes(root, figure, x, y, box, width, height);
    const groups = [];
    for (const [name, value] of figure.references) {
      make("line", { class: "reference", x1: box.left, x2: box.right, y1: y.map(value), y2: y.map(value) }, root);
      make("text", { class: "name", x: box.right - 6, y: y.map(value) + (y.map(value) < box.top + 24 ? 15 : -6), "text-anchor": "end" }, root, name);
    }
    const grid = shown.map((series) => {
      const group = make("g", { style: hue(series.hue), "data-series": series.index }, root);
      groups.push(group);
      const path = series.points.map((p) => `${x.map(p[0]).toFixed(1)},${y.map(p[1]).toFixed(1)}`);
      const errors = series.points.filter((p) => p[2]);
      if (errors.length && !figure.whiskers) {
        const side = (sign) => errors.map((p) => `${x.map(p[0]).toFixed(1)},${y.map(p[1] + sign * p[2]).toFixed(1)}`);
        make("path", { class: "band", d: `M${side(1).join("L")}L${side(-1).reverse().join("L")}Z` }, group);
      }
      make("path", { class: "line", d: `M${path.join("L")}`, "stroke-dasharray": DASHES[series.dash % DASHES.length] }, group);
      if (figure.whiskers) for (const p of errors) make("line", { class: "whisker", x1: x.map(p[0]), x2: x.map(p[0]), y1: y.map(p[1] - p[2]), y2: y.map(p[1] + p[2]) }, group);
      const every = figure.whiskers ? 1 : Math.max(1, Math.ceil(series.points.length / 6));
      const start = figure.whiskers ? 0 : Math.floor((every * (series.index % 4)) / 4);
      series.points.forEach((p, i) => { if (i % every === start % every || i === series.points.length - 1) mark(series.hue, x.map(p[0]), y.map(p[1]), group); });
      return series.points.map((p) => ({
        x: x.map(p[0]), y: y.map(p[1]), group, title: series.name,
        lines: [`${figure.x.title}: ${text(p[0], figure.x.format)}`, `${figure.y.title}: ${text(p[1], figure.y.format)}${p[2] ? ` ± ${text(p[2], figure.y.format)}` : ""}`, ...(p[3] > 1 ? [`mean of ${p[3]} runs`] : [])],
      }));
    });
    if (named) {
      const ends = shown.map((s, i) => ({ name: s.name, y: grid[i].at(-1).y, x: grid[i].at(-1).x, hue: s.hue })).sort((a, b) => a.y - b.y);
      for (let i = 1; i < ends.length; i += 1) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 14);
      const over = ends.length ? Math.max(0, ends.at(-1).y - box.bottom) : 0;
      for (const end of ends) make("text", { class: "name", x: box.right + 8, y: end.y - over + 4 }, root, cut(end.name, room - 8));
    }
    return { root, grid, groups };
  };

  const drawHeat = (figure, width) => {
    const all = figure.values.flat().filter((v) => v !== null);
    const low = figure.low === null ? Math.min(...all) : figure.low;
    const high = figure.high === null ? Math.max(...all) : figure.high;
    const left = Math.min(width * 0.36, Math.max(...figure.rows.map((r) => widthOf(r))) + 10);
    const longest = Math.max(...figure.columns.map((c) => widthOf(c)));
    const wide = (width - left - 2) / figure.columns.length;
    const steep = longest > wide - 4 && figure.columns.some((c) => c.length > 4);
    const cell = steep ? (width - left - Math.min(50, longest * 0.45)) / figure.columns.length : wide;
    const tall = figure.rows.length <= 24 ? (figure.columns.length > 15 || figure.rows.length > 15 ? 15 : 24) : Math.max(5, Math.min(15, 620 / figure.rows.length));
    const head = steep ? Math.min(110, longest * 0.87 + 14) : 18;
    const top = 16 + head;
    const height = Math.round(top + tall * figure.rows.length + 4);
    const root = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    make("text", { class: "title", x: width, y: 11, "text-anchor": "end" }, root, `${figure.x.title} →`);
    make("text", { class: "title", x: 0, y: 11 }, root, `${figure.y.title} ↓`);
    const skip = Math.max(1, Math.ceil((steep ? 13 : longest + 6) / cell));
    figure.columns.forEach((name, c) => {
      if (c % skip) return;
      const at = left + cell * (c + 0.5);
      if (steep) make("text", { x: at + 4, y: top - 5, transform: `rotate(-60 ${at + 4} ${top - 5})` }, root, cut(name, 108));
      else make("text", { x: at, y: top - 5, "text-anchor": "middle" }, root, name);
    });
    const every = Math.max(1, Math.ceil(13 / tall));
    const grid = figure.rows.map((name, r) => {
      const y = top + tall * r;
      if (r % every === 0) make("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, root, cut(name, left - 8));
      return figure.values[r].map((value, c) => {
        const x = left + cell * c;
        const share = value === null || high === low ? 0 : Math.min(1, Math.max(0, (value - low) / (high - low)));
        const node = make("rect", { class: "cell", x, y, width: cell, height: tall }, root);
        node.style.fill = value === null ? "none" : `color-mix(in oklab, var(--heat1) ${(100 * share).toFixed(1)}%, var(--heat0))`;
        const label = value === null ? "" : tick(value, figure.format, 1).replace(" %", "");
        if (tall >= 15 && label && widthOf(label, 11) < cell - 4 && (label !== "0" || figure.rows.length <= 12))
          make("text", { class: share > 0.55 ? "on-high" : "on-low", x: x + cell / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, root, label);
        return { x: x + cell / 2, y: y + tall / 2, box: [x, y, cell, tall], title: `${figure.y.title} ${name}`, lines: [`${figure.x.title}: ${figure.columns[c]}`, `${figure.what}: ${text(value, figure.format)}`] };
      });
    });
    return { root, grid, groups: [], shades: [text(low, figure.format), text(high, figure.format)] };
  };

  const drawBars = (figure, width, hidden) => {
    const parts = figure.parts.map(([name, values], index) => ({ name, values, index })).filter((p) => !hidden.has(p.index));
    const left = Math.min(width * 0.4, Math.max(...figure.rows.map((r) => widthOf(r))) + 10);
    const tall = figure.rows.length <= 20 ? 24 : Math.max(7, 620 / figure.rows.length);
    const sums = figure.rows.map((_, r) => parts.reduce((sum, p) => sum + p.values[r], 0));
    const whole = Math.max(...sums, 0);
    const room = widthOf(text(whole, figure.x.format)) + 12;
    const height = Math.round(4 + tall * figure.rows.length + 38);
    const root = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const bottom = 4 + tall * figure.rows.length;
    const x = scale(figure.x, [0, whole || 1], left, width - room, Math.max(2, Math.floor((width - left - room) / 80)));
    for (const value of x.marks) {
      make("line", { class: "gridline", x1: x.map(value), x2: x.map(value), y1: 4, y2: bottom }, root);
      make("text", { x: x.map(value), y: bottom + 16, "text-anchor": "middle" }, root, tick(value, figure.x.format, x.step));
    }
    make("text", { class: "title", x: width, y: height - 3, "text-anchor": "end" }, root, figure.x.title);
    const every = Math.max(1, Math.ceil(13 / tall));
    const grid = figure.rows.map((name, r) => {
      const y = 4 + tall * r;
      if (r % every === 0) make("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, root, cut(name, left - 8));
      let from = 0;
      const targets = parts.map((part) => {
        const [start, end] = [x.map(from), x.map(from + part.values[r])];
        from += part.values[r];
        make("rect", { class: `bar part${part.index}`, style: hue(0), x: start, y: y + tall * 0.15, width: Math.max(end - start, 0.5), height: tall * 0.7 }, root);
        return { x: (start + end) / 2, y: y + tall / 2, box: [start, y + tall * 0.15, end - start, tall * 0.7], title: name, lines: [`${part.name}: ${text(part.values[r], figure.x.format)}`, ...(parts.length > 1 ? [`in all: ${text(sums[r], figure.x.format)}`] : [])] };
      });
      if (tall >= 13) make("text", { x: x.map(from) + 6, y: y + tall / 2 + 4 }, root, text(sums[r], figure.x.format));
      return targets;
    });
    return { root, grid, groups: [] };
  };

  const DRAW = { lines: drawLines, heat: drawHeat, bars: drawBars };

  // -- one chart: drawing, legend, tooltip, keyboard ----------------------------------------------------------------

  const chart = (holder, figure) => {
    const place = holder.querySelector(".chart");
    const legend = holder.querySelector(".legend");
    const hidden = new Set();
    const tip = element("div", { class: "tip", role: "status", hidden: "" });
    let drawn = null, at = null, width = 0;

    const hide = () => {
      tip.hidden = true;
      at = null;
      place.querySelector(".cursor")?.remove();
      drawn.groups.forEach((group) => group.classList.remove("faded"));
    };

    const show = (row, column) => {
      const target = drawn.grid[row]?.[column];
      if (!target) return;
      hide();
      at = [row, column];
      tip.replaceChildren();
      element("b", {}, tip, target.title);
      target.lines.forEach((line) => element("div", {}, tip, line));
      tip.hidden = false;
      if (target.box) make("rect", { class: "cursor", x: target.box[0], y: target.box[1], width: target.box[2], height: target.box[3] }, drawn.root);
      else make("circle", { class: "cursor", cx: target.x, cy: target.y, r: 7 }, drawn.root);
      drawn.groups.forEach((group) => group.classList.toggle("faded", group !== target.group));
      const ratio = drawn.root.clientWidth / width || 1;
      const [w, h] = [tip.offsetWidth, tip.offsetHeight];
      tip.style.left = `${Math.max(0, Math.min(place.clientWidth - w, target.x * ratio - w / 2))}px`;
      const above = target.y * ratio - h - 14;
      tip.style.top = `${above >= -30 ? above : target.y * ratio + 16}px`;
    };

    const nearest = (event) => {
      const bounds = drawn.root.getBoundingClientRect();
      const [px, py] = [((event.clientX - bounds.left) * width) / bounds.width, ((event.clientY - bounds.top) * width) / bounds.width];
      let best = null, distance = Infinity;
      drawn.grid.forEach((row, r) => row.forEach((target, c) => {
        const [x, y, w, h] = target.box || [target.x, target.y, 0, 0];
        const away = Math.hypot(Math.max(x - px, 0, px - x - w), Math.max(y - py, 0, py - y - h));
        if (away < distance) { distance = away; best = [r, c]; }
      }));
      return distance <= 60 ? best : null;
    };

    const move = (event) => {
      if (!drawn.grid.some((row) => row.length)) return;
      const [row, column] = at || [drawn.grid.findIndex((r) => r.length), -1];
      const go = (r, c) => {
        const to = (r + drawn.grid.length) % drawn.grid.length;
        show(to, Math.max(0, Math.min(drawn.grid[to].length - 1, c)));
      };
      const across = (by) => {
        if (!at) return go(row, 0);
        const to = (row + by + drawn.grid.length) % drawn.grid.length;
        const here = drawn.grid[row][column].x;
        const closest = drawn.grid[to].reduce((best, target, c) => (Math.abs(target.x - here) < Math.abs(drawn.grid[to][best].x - here) ? c : best), 0);
        return go(to, closest);
      };
      const keys = {
        ArrowRight: () => go(row, column + 1), ArrowLeft: () => go(row, column - 1), ArrowDown: () => across(1), ArrowUp: () => across(-1),
        Home: () => go(row, 0), End: () => go(row, Infinity), Escape: hide,
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    };

    const draw = () => {
      width = Math.max(240, Math.round(place.clientWidth));
      const focused = place.contains(document.activeElement);
      drawn = DRAW[figure.kind](figure, width, hidden);
      at = null;
      tip.hidden = true;
      const { root } = drawn;
      root.setAttribute("tabindex", "0");
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", `${figure.title}. Arrow keys walk through the values.`);
      root.addEventListener("pointermove", (event) => { const found = nearest(event); if (found) show(...found); else hide(); });
      root.addEventListener("pointerdown", (event) => { const found = nearest(event); if (found) show(...found); });
      root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
      root.addEventListener("keydown", move);
      root.addEventListener("focus", () => { if (!at && root.matches(":focus-visible")) move({ key: "ArrowRight", preventDefault() {} }); });
      root.addEventListener("blur", hide);
      place.replaceChildren(root, tip);
      if (focused) root.focus();
      if (drawn.shades && !legend.childElementCount) {
        const shades = element("div", { class: "shades" }, legend);
        element("span", {}, shades, `${figure.what}: ${drawn.shades[0]}`);
        element("i", {}, shades);
        element("span", {}, shades, drawn.shades[1]);
      }
    };

    const entries = figure.kind === "lines" ? figure.series : figure.kind === "bars" && figure.parts.length > 1 ? figure.parts.map(([name]) => ({ name, hue: 0 })) : [];
    entries.forEach((entry, index) => {
      const button = element("button", { type: "button", "aria-pressed": "true" }, legend);
      const swatch = make("svg", { viewBox: "0 0 30 12", "aria-hidden": "true", style: hue(entry.hue) }, button);
      if (figure.kind === "bars") make("rect", { class: `bar part${index}`, x: 4, y: 1, width: 22, height: 10 }, swatch);
      else {
        make("path", { class: "line", d: "M0,6H30", "stroke-dasharray": DASHES[entry.dash % DASHES.length] }, swatch);
        mark(entry.hue, 15, 6, swatch);
      }
      button.append(entry.name);
      button.addEventListener("click", () => {
        if (!hidden.delete(index)) hidden.add(index);
        button.setAttribute("aria-pressed", String(!hidden.has(index)));
        draw();
      });
      const fade = (on) => drawn.groups.forEach((group) => group.classList.toggle("faded", on && group.dataset.series !== String(index) && !hidden.has(index)));
      button.addEventListener("pointerenter", () => fade(true));
      button.addEventListener("pointerleave", () => fade(false));
    });

    draw();
    new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 1 && place.clientWidth >= 240) draw(); }).observe(place);
  };

  /** A figure's numbers as a table, made when somebody wants to see them. */
  const numbers = (details, figure) => {
    if (details.querySelector("table")) return;
    const [head, rows] = {
      lines: () => [["series", figure.x.title, figure.y.title, "± standard error", "runs"], figure.series.flatMap((s) => s.points.map((p) => [s.name, text(p[0], figure.x.format), text(p[1], figure.y.format), text(p[2], figure.y.format), p[3]]))],
      heat: () => [[figure.y.title, ...figure.columns], figure.rows.map((name, r) => [name, ...figure.values[r].map((v) => text(v, figure.format))])],
      bars: () => [["", ...figure.parts.map(([name]) => name)], figure.rows.map((name, r) => [name, ...figure.parts.map(([, values]) => text(values[r], figure.x.format))])],
    }[figure.kind]();
    const scroll = element("div", { class: "scroll", tabindex: "0" }, details);
    const table = element("table", {}, scroll);
    const top = element("tr", {}, element("thead", {}, table));
    head.forEach((name) => element("th", { scope: "col" }, top, name));
    const body = element("tbody", {}, table);
    rows.slice(0, MOST_ROWS).forEach((row) => { const line = element("tr", {}, body); row.forEach((value) => element("td", {}, line, String(value))); });
    if (rows.length > MOST_ROWS) element("p", { class: "caption" }, details, `The first ${MOST_ROWS} of ${rows.length} lines; the CSV file has all.`);
  };

  // -- tables -------------------------------------------------------------------------------------------------------

  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const isNumber = head.classList.contains("number");
      const compare = (a, b) => (isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === "" || right === "") return (left === "") - (right === "");
        return down ? compare(right, left) : compare(left, right);
      });
      table.tBodies[0].append(...rows);
    }));
  };

  // -- the page -----------------------------------------------------------------------------------------------------

  const theme = () => {
    const button = document.getElementById("theme");
    const modes = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
    const names = Object.keys(modes);
    let mode = "auto";
    try { mode = localStorage.getItem("fedrts-theme") || "auto"; } catch { /* a file may have no storage */ }
    const apply = () => {
      if (!modes[mode]) mode = "auto";
      if (mode === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = mode;
      button.textContent = modes[mode][0];
      button.setAttribute("aria-label", `Colours: ${modes[mode][1]}`);
    };
    button.addEventListener("click", () => {
      mode = names[(names.indexOf(mode) + 1) % names.length];
      try { localStorage.setItem("fedrts-theme", mode); } catch { /* as above */ }
      apply();
    });
    apply();
  };

  const hatch = make("svg", { width: 0, height: 0, style: "position:absolute", "aria-hidden": "true" }, document.body);
  const pattern = make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, make("defs", {}, hatch));
  make("rect", { width: 6, height: 6, style: "fill: var(--card)" }, pattern);
  make("rect", { width: 2.5, height: 6, style: "fill: var(--hue0)" }, pattern);

  theme();
  for (const [id, figure] of Object.entries(FIGURES)) {
    const holder = document.getElementById(id);
    chart(holder, figure);
    const details = holder.querySelector("details.data");
    details.addEventListener("toggle", () => numbers(details, figure));
  }
  document.querySelectorAll(".table table").forEach(sortable);
})();
