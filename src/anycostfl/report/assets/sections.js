// The sections of the page. Each is built once and returns a function that shows the current runs.

/** A section with a heading, an explanation and a link in the contents. */
function section(id, title, lead, short = title) {
  const heading = make("h2", { id: `${id}-title` }, title);
  const element = make("section", { id, "aria-labelledby": `${id}-title` }, heading, make("p", { class: "lead" }, lead));
  byId("main").append(element);
  byId("contents").append(make("a", { href: `#${id}` }, short));
  return element;
}

/** What could not be read, at the top of the page. */
function remarksSection() {
  const holder = make("div");
  byId("main").append(holder);
  return ({ runs }) => {
    const lines = runs.flatMap((run) => run.remarks.map((text) => (runs.length > 1 ? `${run.name}: ${text}` : text)));
    const list = make("ul", {}, ...lines.map((text) => make("li", {}, text)));
    const note = make("div", { class: "card note", role: "note" }, make("h2", {}, "Not everything could be read"), list);
    holder.replaceChildren(...(lines.length ? [note] : []));
  };
}

// --- what was reached -------------------------------------------------------------------------

function overviewSection() {
  const holder = make("div");
  byId("main").append(holder);
  return ({ runs }) => holder.replaceChildren(runs.length > 1 ? compareRuns(runs) : tiles(runs[0]));
}

function tiles(run) {
  const entries = run.indices.filter(run.isOk);
  const hit = reaches(run, run.target);
  const goal = shown(run.metric, run.target, 0);
  const others = Object.entries(run.others).map(([name, value]) =>
    `${name} ${name.startsWith(run.metric.name) ? shown(run.metric, value, 1) : number(value, 4)}`);
  const down = sum(run.rounds.bytes_down);
  const facts = [
    [capital(run.metric.name), shown(run.metric, finalValue(run), 1), [`best ${shown(run.metric, bestValue(run), 1)}`, ...others].join(", ")],
    ["Rounds", count(run.length), run.target === null ? "" : hit === null ? `${goal} not reached` : `${goal} after ${hit + 1}`],
    ["Simulated time", amount("seconds", run.spent.seconds.at(-1) ?? 0), run.wall_s === null ? "" : `computed in ${amount("seconds", run.wall_s)}`],
    ["Energy of all devices", amount("joules", run.spent.joules.at(-1) ?? 0), `${amount("joules", (run.spent.joules.at(-1) ?? 0) / Math.max(entries.length, 1))} per device and round`],
    ["Uploaded", amount("bytes", run.spent.bytes.at(-1) ?? 0), `${amount("bytes", down)} downloaded`],
    ["Mean width α", number(run.summary.mean_alpha), `β ${number(run.summary.mean_beta)}`],
  ];
  const boxes = facts.map(([name, value, more]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, more))));
  return make("dl", { class: "tiles" }, ...boxes);
}

function compareRuns(runs) {
  const [{ metric }] = runs;
  const finals = runs.map(finalValue);
  const best = bestOf(metric, finals.filter(isNumber));
  const rows = runs.map((run, k) => {
    const value = make("span", finals[k] === best ? { class: "best" } : {}, shown(metric, finals[k]));
    const name = make("span", {}, chip(hue(k)), run.name);
    return [name, run.summary.method, count(run.length), value, shown(metric, bestValue(run)),
      amount("seconds", run.spent.seconds.at(-1) ?? 0), amount("joules", run.spent.joules.at(-1) ?? 0),
      amount("bytes", run.spent.bytes.at(-1) ?? 0), amount("bytes", sum(run.rounds.bytes_down)),
      number(run.summary.mean_alpha), count(run.summary.devices_infeasible), count(run.summary.updates_refused), count(run.summary.devices_suspended)];
  });
  const columns = ["run", "method", "rounds", `final ${metric.name}`, "best", "simulated time", "energy",
    "uploaded", "downloaded", "mean α", "infeasible", "refused", "suspended"];
  return make("div", { class: "card" }, table("The runs side by side", columns, rows, [1]));
}

const COSTS = [["round", "Rounds"], ["seconds", "Simulated time"], ["joules", "Energy"], ["bytes", "Uploaded bytes"]];

function metricSection() {
  const element = section("metric", "How good it is", "The global model on the test samples, over what it took to get there.");
  let cost = "round";
  let latest = null;
  const bar = make("div", { class: "bar" }, choice("Over", COSTS, cost, (value) => { cost = value; show(latest); }));
  element.append(bar);
  const view = figure(element, "", "Chart of the metric. Left and right arrows read it out.");
  const reach = costToReach(element);
  function show(state) {
    latest = state;
    drawMetric(view, state.runs, cost);
    const entries = state.runs.map((run, k) => [hue(k), run.name]);
    view.key.replaceChildren(...(state.runs.length > 1 ? [legend(entries)] : []));
    reach(state);
  }
  return show;
}

function drawMetric(view, runs, cost) {
  const [{ metric }] = runs;
  const [unit, size] = unitFor(cost, Math.max(...runs.map((run) => run.spent[cost].at(-1) ?? 0)));
  const parts = runs.map((run) => [
    run.evaluated.map((r) => run.spent[cost][r] / size),
    run.evaluated.map((r) => metric.factor * run.rounds.metric[r]),
  ]);
  const data = uPlot.join(parts);
  const label = COSTS.find(([name]) => name === cost)[1].toLowerCase() + (unit ? `, ${unit}` : "");
  const values = (index) => runs.map((run, k) => [run.name, known(data[k + 1], index)]).filter(([, v]) => v !== null);
  draw(view, {
    data,
    series: runs.map((_, k) => line(hue(k), k >= HUES.length ? { dash: [8, 4] } : {})),
    x: { label },
    y: { label: capital(metric.name), values: (_, ticks) => ticks.map((v) => `${v} ${metric.unit}`.trim()) },
    height: 340,
    marks: targets(runs),
    describe: (i) => `${cost === "round" ? "After round" : "At"} ${[number(data[0][i], 4), unit].join(" ").trim()}: `
      + values(i).map(([name, v]) => `${runs.length > 1 ? `${name} ` : ""}${shown(metric, v / metric.factor)}`).join(", "),
    tabulate: () => metricTable(runs),
  });
}

/** The targets of the runs, each once. */
function targets(runs) {
  const [{ metric }] = runs;
  return [...new Set(runs.map((run) => run.target))].filter(isNumber).map((t) => [metric.factor * t, `target ${shown(metric, t, 0)}`]);
}

function metricTable(runs) {
  const [{ metric }] = runs;
  const rows = runs.flatMap((run) => run.evaluated.map((r) => [
    ...(runs.length > 1 ? [run.name] : []), String(r + 1), shown(metric, run.rounds.metric[r]),
    amount("seconds", run.spent.seconds[r], 4), amount("joules", run.spent.joules[r], 4), amount("bytes", run.spent.bytes[r], 4),
  ]));
  const first = runs.length > 1 ? ["run", "after round"] : ["after round"];
  return table(`${capital(metric.name)} and what had been spent`, [...first, metric.name, "simulated time", "energy", "uploaded"], rows);
}

/** What each run had spent when it first reached a value of the reader's choice. */
function costToReach(parent) {
  const input = make("input", { type: "number", step: "any" });
  const what = make("span");
  const unit = make("span");
  const holder = make("div");
  const ask = make("label", {}, what, input, unit);
  parent.append(make("div", { class: "card" }, make("div", { class: "bar" }, ask), holder));
  let latest = null;
  const show = (state) => {
    latest = state;
    const [{ metric }] = state.runs;
    what.textContent = `Cost to reach a ${metric.name} of`;
    unit.textContent = metric.unit;
    if (!input.value) input.value = number(metric.factor * commonTarget(state.runs));
    const target = Number(input.value) / metric.factor;
    const rows = state.runs.map((run) => {
      const round = reaches(run, target);
      if (round === null) return [run.name, "not reached", "–", "–", "–"];
      return [run.name, String(round + 1), amount("seconds", run.spent.seconds[round]),
        amount("joules", run.spent.joules[round]), amount("bytes", run.spent.bytes[round])];
    });
    const columns = ["run", "rounds", "simulated time", "energy", "uploaded"];
    holder.replaceChildren(table(`The first round at ${shown(metric, target)} or better`, columns, rows));
  };
  input.addEventListener("input", () => show(latest));
  return show;
}

/** The target of the first run; if nobody reached it, what everybody reached. */
function commonTarget(runs) {
  const [{ target, metric }] = runs;
  if (runs.some((run) => reaches(run, target) !== null)) return target;
  const worst = metric.higher_is_better ? Math.min : Math.max;
  const rounded = metric.higher_is_better ? Math.floor : Math.ceil;
  return rounded(100 * worst(...runs.map((run) => bestValue(run) ?? 0))) / 100;
}

// --- who did what -----------------------------------------------------------------------------

/** With several runs, the sections below show one of them. */
function runChooser(onChange) {
  const holder = make("div", { class: "bar" });
  const select = make("select");
  holder.append(make("label", {}, "The sections below show", select));
  byId("main").append(make("section", { "aria-label": "Choice of run" }, holder));
  select.addEventListener("change", () => onChange(Number(select.value)));
  return ({ runs, chosen }) => {
    holder.hidden = runs.length < 2;
    holder.parentElement.hidden = runs.length < 2;
    select.replaceChildren(...runs.map((run, k) => make("option", { value: k }, run.name)));
    select.value = String(chosen);
  };
}

function whoSection() {
  const element = section("who", "Who took part", "One row per device, one column per round. Point at a cell, or go there with the arrow keys, to read what the device did and paid.");
  let quantity = "alpha";
  let latest = null;
  const options = Object.entries(QUANTITIES).map(([name, { label }]) => [name, label]);
  element.append(make("div", { class: "bar" }, choice("Colour shows", options, quantity, (value) => { quantity = value; show(latest); })));
  const view = heatmap(element);
  const note = element.appendChild(make("p", { class: "readout" }));
  function show(run) {
    latest = run;
    view.update(run, quantity);
    const seen = run.byDevice.size;
    const few = seen > run.rows.length ? `; the map shows the ${count(run.rows.length)} drawn most often` : "";
    note.textContent = `${count(seen)} of ${run.fleet ? counted(run.fleet, "device") : "all devices"} have been in a cohort${few}.`;
  }
  return show;
}

const STRATEGY = [
  ["alpha", "Width α", "share of FLOPs"],
  ["beta", "Compression β", "share of bits"],
  ["frequency_mhz", "Clock f", "MHz"],
];

function strategySection() {
  const element = section("strategies", "Strategies", "The median device of a round, or of several rounds where there are many; the band holds eight of ten.");
  const grid = element.appendChild(make("div", { class: "trio" }));
  const views = STRATEGY.map(([, title, unit]) => figure(grid, `${title}, ${unit}`, `${title} over rounds. Left and right arrows read it out.`));
  return (run) => {
    const step = Math.ceil(run.length / MOST_POINTS) || 1;
    const groups = Array.from({ length: Math.ceil(run.length / step) }, () => []);
    for (const i of run.indices.filter(run.isOk)) groups[Math.floor(run.roundOf[i] / step)].push(i);
    const rounds = groups.map((_, k) => [k * step + 1, Math.min((k + 1) * step, run.length)]);
    STRATEGY.forEach(([name, title], k) => drawBand(views[k], title, rounds, groups.map((entries) =>
      entries.map((i) => run.devices[name][i]).filter(isNumber).sort((a, b) => a - b))));
  };
}

const MOST_POINTS = 200;

/** Median and the middle eight tenths of sorted values per group of rounds. */
function drawBand(view, title, rounds, values) {
  const name = ([from, to]) => (from === to ? String(from) : `${from} to ${to}`);
  const [low, middle, high] = [0.1, 0.5, 0.9].map((share) => values.map((sorted) => quantile(sorted, share)));
  const ink = colour("accent");
  const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  draw(view, {
    data: [rounds.map(([from, to]) => (from + to) / 2), high, low, middle],
    series: [edge, edge, line(ink, { points: { show: false } })],
    bands: [{ series: [1, 2], fill: pale(ink, 0.18) }],
    x: { label: "round" },
    y: {},
    height: 200,
    describe: (i) => `Round ${name(rounds[i])}: ${number(middle[i])} (${number(low[i])} to ${number(high[i])})`,
    tabulate: () => table(`${title} over rounds`, ["round", "lowest tenth", "median", "highest tenth"],
      rounds.map((span, i) => [name(span), number(low[i]), number(middle[i]), number(high[i])])),
  });
}

function boundSection() {
  const element = section("bound", "What bound them", "The constraints that held with equality in the plan of a device. What binds is what would have to grow for the device to do more.");
  const list = element.appendChild(make("div", { class: "card" }));
  const grid = element.appendChild(make("div", { class: "pair" }));
  const views = [["time", "Share of the time budget used"], ["energy", "Share of the energy budget used"]]
    .map(([name, title]) => [name, figure(grid, title, `${title}, a histogram. Left and right arrows read it out.`)]);
  return (run) => {
    const all = Math.max(sum(run.bindKinds.map((kind) => kind.times)), 1);
    const rows = run.bindKinds.map((kind) => [
      kind.words, meter([[kind.times / all, colour("accent")]]), percent(kind.times / all), count(kind.times)]);
    list.replaceChildren(table("Devices and rounds by what bound them", ["bound by", "as a bar", "share", "times"], rows));
    for (const [name, view] of views) drawSlack(view, run, name);
  };
}

const BINS = 24;

/** How much of a budget was used: bins from the least to the most, one of their edges at 100 %. */
function drawSlack(view, run, name) {
  const { value, label } = QUANTITIES[name];
  const used = run.indices.filter(run.isOk).map((i) => value(run, i)).filter(isNumber);
  const [least, most] = extent([...used.map((share) => Math.min(share, 2)), 1]);
  const width = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1].find((w) => (most - least) / w <= BINS) ?? 0.1;
  const first = Math.floor(least / width + 1e-9);
  const tally = Array(Math.max(Math.ceil(most / width - 1e-9) - first, 1)).fill(0);
  for (const share of used) {
    const bin = Math.ceil(Math.min(share, 2) / width - 1e-6) - 1 - first; // a full budget is not beyond it
    tally[Math.min(tally.length - 1, Math.max(0, bin))] += 1;
  }
  const beyond = used.filter((share) => share > 1.0005);
  const places = tally.map((_, i) => 100 * (first + i + 0.5) * width);
  const bin = (i) => `${number(100 * (first + i) * width, 4)} to ${number(100 * (first + i + 1) * width, 4)} %`;
  draw(view, {
    data: [places, tally],
    series: [bars(colour("accent"))],
    x: { label: "% of the budget", values: (_, ticks) => ticks.map((v) => `${number(v, 4)}`) },
    y: { range: (_, __, top) => [0, Math.max(top, 1)] },
    height: 170,
    describe: (i) => `${bin(i)} of the budget: ${counted(tally[i], "time")}`,
    rest: `Half of them used ${percent(quantile([...used].sort((a, b) => a - b), 0.5))} or more; `
      + (beyond.length ? `${counted(beyond.length, "time")} more than the whole, at most ${percent(Math.max(...beyond))}.` : "never more than the whole."),
    tabulate: () => table(label, ["share of the budget", "times"], tally.map((n, i) => [bin(i), count(n)])),
  });
}

/** What devices measured beside what was planned; only real devices measure. */
function budgetsSection() {
  const element = section("budgets", "Planned and measured", "Shares of their budgets that devices planned to use and measured to have used: medians over rounds. A device that plans itself does not disclose its budgets, and what no meter counted is not here.", "Budgets kept");
  const card = element.appendChild(make("div", { class: "card" }));
  return (run) => {
    element.hidden = !run.budgets.length;
    byId("contents").querySelector('[href="#budgets"]').hidden = element.hidden;
    const share = (value) => (isNumber(value) ? percent(value) : "–");
    const rows = run.budgets.slice(0, MOST_ROWS).map((use) => [`device ${use.device}`, use.budget, count(use.rounds),
      share(use.planned), share(use.measured), count(use.over), use.over ? `by ${percent(use.worst - 1)}` : "–"]);
    const joules = run.budgets.some((use) => use.budget === "energy");
    const note = joules ? [] : [make("p", {}, "No device measured joules: energy on this page is planned.")];
    const columns = ["device", "budget", "rounds measured", "planned", "measured", "rounds over", "at most over"];
    card.replaceChildren(table("Who kept which budget", columns, rows), ...note);
  };
}

// --- where it went ----------------------------------------------------------------------------

function whereSection() {
  const element = section("where", "Where joules, seconds and bytes went", "Charged is what was really encoded and really cut, not what was planned.", "Costs");
  const card = element.appendChild(make("div", { class: "card" }));
  const pair = element.appendChild(make("div", { class: "pair" }));
  const overRounds = figure(pair, "Energy of a round", "Energy per round, computing and uploading. Left and right arrows read it out.");
  const perDevice = figure(pair, "Energy of a device, over the whole run", "Energy per device, computing and uploading. Left and right arrows read it out.");
  return (run) => {
    card.replaceChildren(splitTable(run));
    drawRoundEnergy(overRounds, run);
    drawDeviceEnergy(perDevice, run);
  };
}

function splitTable(run) {
  const { rounds } = run;
  const refused = run.indices.filter(run.isRefused);
  const split = (what, kind, parts) => {
    const total = sum(parts.map(([, value]) => value));
    const share = (value) => (total ? value / total : 0);
    const words = parts.map(([name, value]) => `${name} ${percent(share(value))}`).join(", ");
    const colours = [colour("accent"), colour("second")];
    return [what, amount(kind, total), meter(parts.map(([, value], k) => [share(value), colours[k]])), words];
  };
  const view = table("Totals of the run", ["what", "total", "as a bar", "of it"], [
    split("Energy of all devices", "joules", [["computing", sum(rounds.compute_j)], ["uploading", sum(rounds.upload_j)]]),
    split("Time, of the slowest device of each round", "seconds", [["computing", sum(rounds.compute_s)], ["uploading", sum(rounds.upload_s)]]),
    split("Bytes", "bytes", [["down (sub-models)", sum(rounds.bytes_down)], ["up (updates)", sum(rounds.bytes_up)]]),
    ["Wasted on refused updates", amount("joules", sum(refused.map(run.energyOf))), "",
      `${amount("bytes", sum(refused.map((i) => run.devices.bytes_up[i])))} up`],
  ], [3]);
  return view;
}

const SPLIT = ["computing", "uploading"];

/** Two series stacked: the sum behind, the first part in front. */
function drawStack(view, { places, label, first, second, describe, shape, tabulate }) {
  const top = Math.max(...first.map((value, i) => value + second[i]), 0);
  const [unit, size] = unitFor("joules", top);
  const scaled = (values) => values.map((value) => value / size);
  const colours = [colour("second"), colour("accent")];
  draw(view, {
    data: [places, scaled(first.map((value, i) => value + second[i])), scaled(first)],
    series: colours.map(shape),
    x: { label },
    y: { values: (_, ticks) => ticks.map((v) => `${v} ${unit}`), range: (_, __, high) => [0, high || 1], size: 60 },
    height: 220,
    describe: (i) => `${describe(i)}: ${SPLIT[0]} ${amount("joules", first[i])}, ${SPLIT[1]} ${amount("joules", second[i])}`,
    tabulate,
  });
  view.key.replaceChildren(legend([[colours[1], SPLIT[0]], [colours[0], SPLIT[1]]]));
}

function drawRoundEnergy(view, run) {
  const { compute_j: first, upload_j: second } = run.rounds;
  const few = run.length <= 100;
  const area = (ink) => ({ stroke: ink, fill: ink, width: 0, points: { show: false } });
  drawStack(view, {
    places: run.spent.round,
    label: "round",
    first,
    second,
    describe: (i) => `Round ${i + 1}`,
    shape: few ? bars : area,
    tabulate: () => table("Energy of every round", ["round", ...SPLIT],
      run.spent.round.map((round, i) => [String(round), amount("joules", first[i]), amount("joules", second[i])])),
  });
}

function drawDeviceEnergy(view, run) {
  const devices = [...run.byDevice].map(([device, entries]) => ({
    device,
    first: sum(entries.map((i) => run.devices.compute_j[i])),
    second: sum(entries.map((i) => run.devices.upload_j[i])),
  })).sort((a, b) => b.first + b.second - a.first - a.second);
  drawStack(view, {
    places: devices.map((_, i) => i + 1),
    label: "devices, the one that spent most first",
    first: devices.map((d) => d.first),
    second: devices.map((d) => d.second),
    describe: (i) => `Device ${devices[i].device}`,
    shape: bars,
    tabulate: () => table("Energy of every device", ["device", ...SPLIT],
      devices.map((d) => [String(d.device), amount("joules", d.first), amount("joules", d.second)])),
  });
}

// --- who did not ------------------------------------------------------------------------------

const MOST_REASONS = 50;

function absentSection() {
  const element = section("absent", "Sat out and refused", "A device sits out when even the smallest strategy breaks its budgets. A refused update was sent but not used; a device that is refused often is suspended for some rounds.");
  const card = element.appendChild(make("div", { class: "card" }));
  return (run) => {
    const reasons = new Map();
    for (const i of run.indices) {
      if (run.isOk(i)) continue;
      const status = run.statusOf(i).replace(/^suspended: .*/, "suspended: refused too often").replace(/^excluded: .*/, "excluded: points away from the others");
      if (!reasons.has(status)) reasons.set(status, []);
      reasons.get(status).push(i);
    }
    const rows = [...reasons].sort(([, a], [, b]) => b.length - a.length).slice(0, MOST_REASONS).map(([status, entries]) => {
      const who = new Set(entries.map((i) => run.devices.device[i]));
      return [status, count(entries.length), count(who.size), String(run.roundOf[entries[0]] + 1), String(run.roundOf[entries.at(-1)] + 1)];
    });
    const more = reasons.size - rows.length;
    const title = `Why${more > 0 ? `; ${counted(more, "rarer reason")} left out` : ""}`;
    const causes = Object.entries(run.summary.refused_because).map(([cause, times]) => `${cause} ${times}`).join(", ");
    const told = causes ? [make("p", {}, `Refused, by cause: ${causes}.`)] : [];
    card.replaceChildren(...told, rows.length
      ? table(title, ["reason", "times", "devices", "first round", "last round"], rows)
      : make("p", {}, "Nobody sat out, and no update was refused."));
  };
}

function widthsSection() {
  const element = section("widths", "Sub-models", "The trained model, cut to other widths.");
  const view = figure(element, "Over width α", "The metric of sub-models over their width. Left and right arrows read it out.");
  return ({ runs }) => {
    const measured = runs.map((run, k) => ({ run, k })).filter(({ run }) => run.widths.length);
    element.hidden = !measured.length;
    byId("contents").querySelector('[href="#widths"]').hidden = element.hidden;
    if (element.hidden) return;
    const [{ metric }] = runs;
    const inFull = (run) => run.widths.filter((w) => (w.precision ?? "fp32") === "fp32");
    const data = uPlot.join(measured.map(({ run }) => [inFull(run).map((w) => w.alpha), inFull(run).map((w) => metric.factor * w.metric)]));
    const named = runs.length > 1;
    const words = ({ run }, value) => `${named ? `${run.name} ` : ""}${shown(metric, isNumber(value) ? value / metric.factor : null)}`;
    draw(view, {
      data,
      series: measured.map(({ k }) => line(hue(k), { points: { show: true, size: 7 } })),
      x: { label: "width α" },
      y: { label: capital(metric.name), values: (_, ticks) => ticks.map((v) => `${v} ${metric.unit}`.trim()) },
      describe: (i) => `α ${number(data[0][i])}: ${measured.map((one, k) => words(one, data[k + 1][i])).join(", ")}`,
      tabulate: () => make("div", {}, ...measured.map(({ run }) => widthsTable(run, named))),
    });
    view.key.replaceChildren(...(named ? [legend(measured.map(({ run, k }) => [hue(k), run.name]))] : []));
  };
}

function widthsTable(run, named) {
  const keys = Object.keys(run.widths[0]);
  const cell = (key, value) => (key === "metric" ? shown(run.metric, value) : isNumber(value) ? number(value, 4) : String(value ?? "–"));
  return table(named ? `Sub-models of ${run.name}` : "Measured sub-models", keys.map((key) => (key === "metric" ? run.metric.name : key.replaceAll("_", " "))),
    run.widths.map((row) => keys.map((key) => cell(key, row[key]))));
}

function devicesSection() {
  const element = section("devices", "Devices", "Every device that was in a cohort; means are over the rounds in which its update was used.");
  const card = element.appendChild(make("div", { class: "card" }));
  return (run) => {
    const d = run.devices;
    const rows = [...run.byDevice].slice(0, MOST_ROWS).map(([device, entries]) => {
      const ok = entries.filter(run.isOk);
      return [`device ${device}`, count(entries.length), count(ok.length), count(entries.filter(run.isSitOut).length),
        count(entries.filter(run.isRefused).length), number(meanOver(ok, d.alpha)), number(meanOver(ok, d.beta)),
        ok.length ? `${number(meanOver(ok, d.frequency_mhz))} MHz` : "–",
        amount("joules", sum(entries.map(run.energyOf))), amount("bytes", sum(entries.map((i) => d.bytes_up[i])))];
    });
    const columns = ["device", "in cohort", "took part", "sat out", "refused", "mean α", "mean β", "mean f", "energy", "uploaded"];
    card.replaceChildren(table("Over the whole run", columns, rows));
  };
}

// --- what was asked ---------------------------------------------------------------------------

function configSection() {
  const element = section("config", "Configuration and machine", "Saved as config.toml, this repeats the run.", "Configuration");
  const differences = element.appendChild(make("div", { class: "card" }));
  const pair = element.appendChild(make("div", { class: "pair" }));
  const text = pair.appendChild(make("div", { class: "card" }));
  const machine = pair.appendChild(make("div", { class: "card" }));
  return ({ runs, chosen }) => {
    const run = runs[chosen];
    const rows = runs.length > 1 ? differing(runs) : [];
    differences.hidden = runs.length < 2;
    differences.replaceChildren(rows.length
      ? table("Where the configurations differ", ["key", ...runs.map((r) => r.name)], rows)
      : make("p", {}, "The configurations are the same."));
    text.replaceChildren(make("h3", {}, "config.toml"), make("pre", { tabindex: "0", role: "region", "aria-label": "config.toml" }, run.config));
    const facts = Object.entries(run.environment).flatMap(([key, value]) =>
      [make("dt", {}, key.replaceAll("_", " ")), make("dd", {}, value)]);
    machine.replaceChildren(make("h3", {}, "Where it ran"), make("dl", { class: "facts" }, ...facts));
  };
}

/** The keys whose values are not the same in all configurations. */
function differing(runs) {
  const read = runs.map((run) => configKeys(run.config));
  const keys = new Set(read.flatMap((found) => [...found.keys()]));
  return [...keys]
    .map((key) => [key, ...read.map((found) => found.get(key) ?? "–")])
    .filter(([, ...values]) => new Set(values).size > 1);
}

/** "section.key" → value, from the TOML that the program writes: one key a line. */
function configKeys(text) {
  const found = new Map();
  let name = "";
  for (const row of text.split("\n")) {
    const header = row.match(/^\[(.+)\]$/);
    const pair = row.match(/^(\w+) = (.*)$/);
    if (header) name = `${header[1]}.`;
    else if (pair) found.set(name + pair[1], pair[2]);
  }
  return found;
}
