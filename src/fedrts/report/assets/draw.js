// Figures as SVG. Each function gives the drawing and a grid of targets: what the pointer and the arrow keys can reach.

const DASHES = ["", "7 4", "2 3", "9 3 2 3", "14 4"];
const HUES = 8;

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
/** Text of at most this width: the middle gives way, names of layers differ at their ends. */
const cut = (content, width, weight = "") => {
  if (widthOf(content, 12, weight) <= width) return content;
  for (let kept = content.length - 1; kept > 2; kept -= 1) {
    const shorter = `${content.slice(0, Math.floor(kept / 3))}…${content.slice(-Math.ceil((2 * kept) / 3))}`;
    if (widthOf(shorter, 12, weight) <= width) return shorter;
  }
  return "…";
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
  const named = shown.length <= 6 && width >= 380;
  const room = named ? Math.min(width * 0.36, Math.max(0, ...shown.map((s) => widthOf(s.name, 12, "600"))) + 14) : 10;
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
    if (figure.whiskers)
      for (const [at, value, error] of errors)
        make("line", { class: "whisker", x1: x.map(at), x2: x.map(at), y1: y.map(value - error), y2: y.map(value + error) }, group);
    const every = figure.whiskers ? 1 : Math.max(1, Math.ceil(series.points.length / 6));
    const start = figure.whiskers ? 0 : Math.floor((every * (series.index % 4)) / 4);
    series.points.forEach(([at, value], i) => {
      if (i % every === start % every || i === series.points.length - 1) mark(series.hue, x.map(at), y.map(value), group);
    });
    return series.points.map((p) => ({
      x: x.map(p[0]), y: y.map(p[1]), group, title: series.name,
      lines: [
        `${figure.x.title}: ${text(p[0], figure.x.format)}`,
        `${figure.y.title}: ${text(p[1], figure.y.format)}${p[2] ? ` ± ${text(p[2], figure.y.format)}` : ""}`,
        ...(p[3] > 1 ? [`mean of ${p[3]} runs`] : []),
      ],
    }));
  });
  if (named) {
    const ends = shown.map((s, i) => ({ name: s.name, y: grid[i].at(-1).y, x: grid[i].at(-1).x, hue: s.hue, at: grid[i].at(-1).y })).sort((a, b) => a.y - b.y);
    for (let i = 1; i < ends.length; i += 1) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 14);
    const over = ends.length ? Math.max(0, ends.at(-1).y - box.bottom) : 0;
    for (const end of ends) {
      make("path", { class: "leader", style: hue(end.hue), d: `M${end.x + 5},${end.at}L${box.right + 6},${end.y - over}` }, root);
      make("text", { class: "name", style: hue(end.hue), x: box.right + 8, y: end.y - over + 4 }, root, cut(end.name, room - 8, "600"));
    }
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
  const many = figure.columns.length > 15 || figure.rows.length > 15;
  const tall = figure.rows.length > 24 ? Math.max(5, Math.min(15, 620 / figure.rows.length)) : many ? 15 : 24;
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
      if (tall >= 15 && label && widthOf(label, 11) < cell - 4 && (label !== "0" || (figure.rows.length <= 12 && figure.columns.length <= 12)))
        make("text", { class: share > 0.55 ? "on-high" : "on-low", x: x + cell / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, root, label);
      const lines = [`${figure.x.title}: ${figure.columns[c]}`, `${figure.what}: ${text(value, figure.format)}`];
      return { x: x + cell / 2, y: y + tall / 2, box: [x, y, cell, tall], title: `${figure.y.title} ${name}`, lines };
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
      const box = [start, y + tall * 0.15, Math.max(end - start, 0.5), tall * 0.7];
      make("rect", { class: `bar part${part.index}`, style: hue(0), x: box[0], y: box[1], width: box[2], height: box[3] }, root);
      const lines = [`${part.name}: ${text(part.values[r], figure.x.format)}`];
      if (parts.length > 1) lines.push(`in all: ${text(sums[r], figure.x.format)}`);
      return { x: (start + end) / 2, y: y + tall / 2, box, title: name, lines };
    });
    if (tall >= 13) make("text", { x: x.map(from) + 6, y: y + tall / 2 + 4 }, root, text(sums[r], figure.x.format));
    return targets;
  });
  return { root, grid, groups: [] };
};

const DRAW = { lines: drawLines, heat: drawHeat, bars: drawBars };
