// Numbers as people read them (report/format.py writes them the same way), and the ticks of an axis.

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
  number: (value) => (Math.abs(value) >= 1e9 ? value.toExponential(3).replace(/e\+(\d)$/, "e+0$1") : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)))),
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
      for (const m of wanted) {
        const at = Number((m * 10 ** power).toPrecision(3));
        if (at >= low * 0.999 && at <= high * 1.001) found.push(at);
      }
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
  const bend = log ? Math.log : (value) => value;
  const map = (value) => from + ((bend(value) - bend(low)) / (bend(high) - bend(low))) * (to - from);
  return { map, marks, step };
};
