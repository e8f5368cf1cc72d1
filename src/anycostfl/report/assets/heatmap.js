// Who took part: one row per device, one column per round, one colour per value.

const MOST_ROWS = 1000;

const QUANTITIES = {
  alpha: { label: "Width α", value: (run, i) => run.devices.alpha[i], show: (v) => number(v) },
  beta: { label: "Compression β", value: (run, i) => run.devices.beta[i], show: (v) => number(v) },
  clock: { label: "Clock f", value: (run, i) => run.devices.frequency_mhz[i], show: (v) => `${number(v)} MHz` },
  time: { label: "Time used", value: (run, i) => run.timeShare(i), show: (v) => percent(v) },
  energy: { label: "Energy used", value: (run, i) => run.devices.energy_share[i], show: (v) => percent(v) },
  binds: { label: "What bound", value: (run, i) => run.devices.binds[i] },
};

const RAMPS = {
  light: [[231, 240, 240], [143, 196, 199], [47, 140, 153], [13, 82, 96], [6, 42, 52]],
  dark: [[33, 52, 58], [38, 92, 102], [64, 150, 163], [122, 205, 213], [214, 245, 246]],
};

const SHADES = 256;

/** The colours of the ramp, from the lowest value to the highest. */
function shades() {
  const stops = RAMPS[isDark() ? "dark" : "light"];
  return Array.from({ length: SHADES }, (_, shade) => {
    const place = (shade / (SHADES - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((from, k) => Math.round(from + (stops[low + 1][k] - from) * (place - low)));
  });
}

function rgb(text) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = text;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

/** How each entry of a run is coloured under a quantity, and the legend that says so. */
function colouring(run, quantity) {
  const { value, show } = QUANTITIES[quantity];
  const absent = rgb(colour("absent"));
  const bad = rgb(colour("bad"));
  const status = (paint) => (i) => (run.isOk(i) ? paint(i) : run.isSitOut(i) ? absent : bad);
  const rest = [[colour("absent"), "sat out"], [colour("bad"), "refused"]];
  if (quantity === "binds") {
    const kinds = run.bindKinds.map((kind) => kind.mask);
    const place = new Map(kinds.map((mask, k) => [mask, rgb(hue(Math.min(k, HUES.length - 1)))]));
    const entries = run.bindKinds.slice(0, HUES.length - 1).map((kind, k) => [hue(k), kind.words]);
    if (kinds.length >= HUES.length) entries.push([hue(HUES.length - 1), "anything else"]);
    return { paint: status((i) => place.get(run.devices.binds[i])), legend: legend([...entries, ...rest]) };
  }
  const values = run.indices.filter((i) => run.isOk(i)).map((i) => value(run, i)).filter(isNumber);
  const [low, high] = extent(values);
  const share = (v) => (isNumber(v) ? (high > low ? (v - low) / (high - low) : 0.5) : 0);
  const ramp = shades();
  const shade = (v) => ramp[Math.round(share(v) * (SHADES - 1))];
  const scale = make("span", { class: "ramp", "aria-hidden": "true" });
  const stops = [0, 64, 128, 192, 255].map((place) => `rgb(${ramp[place].join(" ")})`);
  scale.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  const key = legend(rest);
  key.prepend(make("li", {}, show(low), scale, show(high)));
  return { paint: status((i) => shade(value(run, i))), legend: key };
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of values) {
    low = Math.min(low, v);
    high = Math.max(high, v);
  }
  return low <= high ? [low, high] : [0, 1];
}

/** Draw the map into its box; returns where a place of the box is on the map. */
function drawHeatmap(box, run, quantity) {
  const { paint, legend: key } = colouring(run, quantity);
  const [columns, rows] = [Math.max(run.length, 1), Math.max(run.rows.length, 1)];
  const [left, top, bottom] = [34, 6, 34];
  const width = Math.max(box.clientWidth, 120);
  const inner = width - left - 18;
  const high = Math.min(Math.max(rows * 9, 140), 520);
  const canvas = box.querySelector("canvas") ?? box.appendChild(make("canvas"));
  const dots = devicePixelRatio;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round((top + high + bottom) * dots);
  canvas.style.height = `${top + high + bottom}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(dots, 0, 0, dots, 0, top * dots);
  pen.fillStyle = colour("grid");
  pen.fillRect(left, 0, inner, high);
  const [across, down] = [inner / columns, high / rows];
  if (across >= 2 && down >= 2) paintCells(pen, run, paint, { left, across, down });
  else paintPixels(pen, run, paint, { left, inner, high, columns, rows });
  labelMap(pen, run, { left, inner, high, across, down });
  return {
    legend: key,
    place: (x, y) => ({ round: Math.floor((x - left) / across), row: Math.floor((y - top) / down) }),
    frame: ({ round, row }) => ({
      left: `${left + round * across}px`,
      top: `${top + row * down}px`,
      width: `${Math.max(across, 4)}px`,
      height: `${Math.max(down, 4)}px`,
    }),
  };
}

/** Cells large enough to see, with a gap between them. */
function paintCells(pen, run, paint, { left, across, down }) {
  const gap = Math.min(across, down) >= 5 ? 1 : 0;
  for (const i of run.indices) {
    const row = run.rowOf.get(run.devices.device[i]);
    if (row === undefined) continue;
    pen.fillStyle = `rgb(${paint(i).join(" ")})`;
    pen.fillRect(left + run.roundOf[i] * across, row * down, across - gap + (gap ? 0 : 0.3), down - gap + (gap ? 0 : 0.3));
  }
}

/** More cells than dots: one pixel each, then scaled smoothly, but no row into the next. */
function paintPixels(pen, run, paint, { left, inner, high, columns, rows }) {
  const sheet = make("canvas", { width: columns, height: rows });
  const small = sheet.getContext("2d");
  const image = small.createImageData(columns, rows);
  for (const i of run.indices) {
    const row = run.rowOf.get(run.devices.device[i]);
    if (row === undefined) continue;
    const place = 4 * (row * columns + run.roundOf[i]);
    [image.data[place], image.data[place + 1], image.data[place + 2]] = paint(i);
    image.data[place + 3] = 255;
  }
  small.putImageData(image, 0, 0);
  pen.imageSmoothingQuality = "high";
  if (high < 2 * rows) pen.drawImage(sheet, left, 0, inner, high);
  else for (let row = 0; row < rows; row += 1) pen.drawImage(sheet, 0, row, columns, 1, left, (row * high) / rows, inner, high / rows - 1);
}

function labelMap(pen, run, { left, inner, high, across, down }) {
  pen.fillStyle = colour("muted");
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const everyRow = Math.max(1, Math.ceil(18 / down));
  run.rows.forEach((device, row) => {
    if (row % everyRow === 0) pen.fillText(String(device), left - 6, (row + 0.5) * down);
  });
  pen.textAlign = "center";
  const everyRound = niceStep(run.length / Math.max(2, inner / 70));
  for (let round = everyRound; round <= run.length; round += everyRound) {
    pen.fillText(count(round), left + (round - 0.5) * across, high + 12);
  }
  pen.fillText("round", left + inner / 2, high + 27);
}

/** 1, 2 or 5 times a power of ten, at least the given step. */
function niceStep(step) {
  const size = 10 ** Math.floor(Math.log10(Math.max(step, 1)));
  return [1, 2, 5, 10].map((n) => n * size).find((n) => n >= step) ?? 10 * size;
}

/** The text for a cell. */
function describeCell(run, round, row) {
  const device = run.rows[row];
  const i = run.entryAt(round, device);
  const where = `Round ${round + 1}, device ${device}: `;
  if (i === undefined) return `${where}not in the cohort`;
  if (run.isSitOut(i)) return where + run.statusOf(i);
  const d = run.devices;
  const paid = `α ${number(d.alpha[i])}, β ${number(d.beta[i])}, ${number(d.frequency_mhz[i])} MHz; `
    + `${amount("seconds", d.latency_s[i])} (${percent(run.timeShare(i), 0)} of its time), `
    + `${amount("joules", run.energyOf(i))} (${percent(d.energy_share[i], 0)} of its energy), `
    + `${amount("bytes", d.bytes_up[i])} up; bound by ${run.bindWords(d.binds[i])}`;
  return where + (run.isOk(i) ? paid : `${run.statusOf(i)}; ${paid}`);
}

/** The cell nearest to a place that may lie outside. */
const inside = (run, { round, row }) => ({
  round: Math.max(0, Math.min(run.length - 1, round)),
  row: Math.max(0, Math.min(run.rows.length - 1, row)),
});

/** The map with its keys, pointer and readout; a figure whose chart is a canvas. */
function heatmap(parent) {
  const help = "Who took part, a map of devices and rounds. Arrow keys go from cell to cell.";
  const view = figure(parent, "", help);
  const { box, readout } = view;
  box.classList.add("heat");
  box.setAttribute("role", "application");
  const cursor = box.appendChild(make("i", { class: "cell", hidden: "" }));
  Object.assign(view, { at: null, run: null, quantity: "alpha" });
  view.tabulate = () => tabulateMap(view.run, view.quantity);
  view.paint = () => {
    view.map = drawHeatmap(box, view.run, view.quantity);
    show(view.at);
  };
  view.update = (run, quantity) => {
    Object.assign(view, { run, quantity });
    view.paint();
    view.key.replaceChildren(view.map.legend);
    view.fill();
  };
  const show = (wanted) => {
    const at = wanted && inside(view.run, wanted);
    view.at = at;
    cursor.hidden = !at || !view.run.rows.length;
    readout.textContent = cursor.hidden ? "" : describeCell(view.run, at.round, at.row);
    if (at) Object.assign(cursor.style, view.map.frame(at));
  };
  box.addEventListener("pointermove", (event) => {
    const from = box.getBoundingClientRect();
    show(view.map.place(event.clientX - from.left, event.clientY - from.top));
  });
  box.addEventListener("pointerleave", () => document.activeElement !== box && show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in moves) || !view.run.length) return;
    event.preventDefault();
    const [right, down] = moves[event.key];
    const at = view.at ?? { round: -right, row: -down };
    show({ round: at.round + right, row: at.row + down });
  });
  let width = 0;
  new ResizeObserver(() => {
    if (view.run && box.clientWidth !== width) view.paint();
    width = box.clientWidth;
  }).observe(box);
  return view;
}

function tabulateMap(run, quantity) {
  const { value, show, label } = QUANTITIES[quantity];
  const cell = (i) => {
    if (i === undefined) return "";
    if (!run.isOk(i)) return run.isSitOut(i) ? "sat out" : "refused";
    return quantity === "binds" ? run.bindWords(value(run, i)) : show(value(run, i));
  };
  const rows = Array.from({ length: run.length }, (_, round) =>
    [String(round + 1), ...run.rows.map((device) => cell(run.entryAt(round, device)))]);
  return table(`${label} of every device in every round`, ["round", ...run.rows.map((d) => `device ${d}`)], rows);
}
