// The page: charts with legend, tooltip and keyboard; tables that sort; light and dark.

const MOST_ROWS = 2000;

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
      element("span", {}, shades, figure.what);
      const ramp = element("span", { class: "ramp" }, shades);
      element("span", {}, ramp, drawn.shades[0]);
      element("i", {}, ramp);
      element("span", {}, ramp, drawn.shades[1]);
    }
  };

  const parts = figure.kind === "bars" && figure.parts.length > 1 ? figure.parts.map(([name]) => ({ name, hue: 0 })) : [];
  const entries = figure.kind === "lines" ? figure.series : parts;
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
    const fade = (on) => drawn.groups.forEach((group) => {
      group.classList.toggle("faded", on && group.dataset.series !== String(index) && !hidden.has(index));
    });
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
    lines: () => [
      ["series", figure.x.title, figure.y.title, "± standard error", "runs"],
      figure.series.flatMap((series) => series.points.map(([x, y, error, runs]) => [
        series.name, text(x, figure.x.format), text(y, figure.y.format), text(error, figure.y.format), runs,
      ])),
    ],
    heat: () => [
      [figure.y.title, ...figure.columns],
      figure.rows.map((name, r) => [name, ...figure.values[r].map((value) => text(value, figure.format))]),
    ],
    bars: () => [
      ["", ...figure.parts.map(([name]) => name)],
      figure.rows.map((name, r) => [name, ...figure.parts.map(([, values]) => text(values[r], figure.x.format))]),
    ],
  }[figure.kind]();
  const scroll = element("div", { class: "scroll", tabindex: "0" }, details);
  const table = element("table", {}, scroll);
  const top = element("tr", {}, element("thead", {}, table));
  head.forEach((name) => element("th", { scope: "col" }, top, name));
  const body = element("tbody", {}, table);
  for (const row of rows.slice(0, MOST_ROWS)) {
    const line = element("tr", {}, body);
    row.forEach((value) => element("td", {}, line, String(value)));
  }
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
const turned = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
const pattern = make("pattern", { id: "hatch", width: 6, height: 6, ...turned }, make("defs", {}, hatch));
make("rect", { width: 6, height: 6, style: "fill: var(--card)" }, pattern);
make("rect", { width: 2.5, height: 6, style: "fill: var(--hue0)" }, pattern);

/** Bring the page's content to life; again when it was renewed. */
const fill = () => {
  for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent))) {
    const holder = document.getElementById(id);
    chart(holder, figure);
    const details = holder.querySelector("details.data");
    details.addEventListener("toggle", () => numbers(details, figure));
  }
  document.querySelectorAll(".table table").forEach(sortable);
};

theme();
fill();
