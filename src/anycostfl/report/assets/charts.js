// Line, area and bar charts: uPlot with our axes, a readout as text, and arrow keys.

/** A titled chart with a readout below and its numbers as a table; `draw` fills it. */
function figure(parent, title, label) {
  const box = make("div", { class: "chart", tabindex: "0", role: "group", "aria-label": label });
  const readout = make("p", { class: "readout", "aria-live": "off" });
  const holder = make("div");
  const details = make("details", {}, make("summary", {}, "The numbers as a table"), holder);
  const heading = title ? [make("h3", {}, title)] : [];
  const key = make("div");
  parent.append(make("div", { class: "card" }, ...heading, box, readout, key, details));
  const view = { box, readout, key, chart: null, tabulate: () => "" };
  view.fill = () => details.open && holder.replaceChildren(view.tabulate());
  details.addEventListener("toggle", view.fill);
  box.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  box.addEventListener("blur", () => readout.setAttribute("aria-live", "off"));
  box.addEventListener("keydown", (event) => stepCursor(view, event));
  new ResizeObserver(() => view.chart?.setSize({ width: box.clientWidth, height: view.chart.height })).observe(box);
  return view;
}

/** Arrow keys move along the chart, Home and End to its ends. */
function stepCursor(view, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!view.chart || !(event.key in steps)) return;
  event.preventDefault();
  const last = view.chart.data[0].length - 1;
  view.index = Math.min(last, Math.max(0, (view.index ?? -1) + steps[event.key]));
  view.chart.setCursor({ left: view.chart.valToPos(view.chart.data[0][view.index], "x"), top: 10 });
}

function axis(more) {
  return {
    stroke: colour("muted"),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    ...more,
  };
}

/**
 * Draw or draw again. `data` is uPlot's: x, then one array per series. `describe(index)` is the
 * readout at the cursor, `rest` the one without a cursor; `tabulate()` gives the numbers.
 * `marks` are horizontal lines: [value, label].
 */
function draw(view, { data, series, x, y, height = 280, describe, rest, tabulate, marks = [], bands = [] }) {
  view.chart?.destroy();
  view.tabulate = tabulate;
  const last = data[0].length - 1;
  const say = (index) => { view.readout.textContent = index != null ? describe(index) : rest ?? (last < 0 ? "" : describe(last)); };
  const options = {
    width: Math.max(view.box.clientWidth, 120),
    height,
    padding: [12, 20, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: false, ...(series[0]?.isBars && { range: barRange }) }, y: y.range ? { range: y.range } : {} },
    axes: [
      axis({ label: x.label, labelSize: 22, size: 32, space: 60, ...(x.values && { values: x.values }), grid: { show: false } }),
      axis({ size: y.size ?? 52, ...(y.values && { values: y.values }) }),
    ],
    series: [{}, ...series],
    bands,
    hooks: {
      draw: [(chart) => marks.forEach(([value, label]) => drawMark(chart, value, label))],
      setCursor: [(chart) => say(chart.cursor.idx)],
    },
  };
  view.chart = new uPlot(options, data, view.box);
  say(null);
  view.fill();
}

/** A dashed line across the chart, such as a target. */
function drawMark(chart, value, label) {
  const place = chart.valToPos(value, "y", true);
  const { left, top, width, height } = chart.bbox;
  if (!(place >= top && place <= top + height)) return;
  const ink = chart.ctx;
  ink.save();
  ink.strokeStyle = colour("muted");
  ink.fillStyle = colour("muted");
  ink.lineWidth = devicePixelRatio;
  ink.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
  ink.beginPath();
  ink.moveTo(left, place);
  ink.lineTo(left + width, place);
  ink.stroke();
  ink.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  ink.textAlign = "left";
  const isHigh = place - top < 18 * devicePixelRatio; // no room above: write below the line
  ink.textBaseline = isHigh ? "top" : "bottom";
  ink.fillText(label, left + 4 * devicePixelRatio, place + (isHigh ? 4 : -3) * devicePixelRatio);
  ink.restore();
}

const line = (stroke, more = {}) => ({ stroke, width: 2, spanGaps: true, points: { size: 5 }, ...more });

const bars = (fill) => ({
  isBars: true, fill, stroke: fill, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.85, 40] }),
});

/** Room for half a bar at both ends. */
function barRange(chart, low, high) {
  const half = chart.data[0].length > 1 ? (high - low) / (chart.data[0].length - 1) / 2 : 0.5;
  return [low - half, high + half];
}

/** A paler version of a colour, to fill with. */
const pale = (name, share) => `color-mix(in srgb, ${name} ${100 * share}%, transparent)`;

/** The last index at or before which a series has a value. */
function known(values, index) {
  while (index >= 0 && values[index] == null) index -= 1;
  return index < 0 ? null : values[index];
}
