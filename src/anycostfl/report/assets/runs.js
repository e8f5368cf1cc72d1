// A run: the columns of the file with what the sections look up in them.

const running = (values) => {
  let total = 0;
  return values.map((value) => (total += value ?? 0));
};

/** Add lookups to the columns of one run. */
function readRun(data) {
  const { rounds, devices, statuses } = data;
  const length = rounds.cohort.length;
  const roundOf = rounds.cohort.flatMap((size, round) => Array(size).fill(round));
  const kinds = statuses.map((status) => (status === "ok" ? 0 : /^(infeasible|suspended)/.test(status) ? 1 : 2));
  const index = new Map(devices.device.map((device, i) => [`${roundOf[i]}/${device}`, i]));
  const seconds = rounds.compute_s.map((value, i) => value + rounds.upload_s[i]);
  const joules = rounds.compute_j.map((value, i) => value + rounds.upload_j[i]);
  const evaluated = rounds.metric.flatMap((value, round) => (value === null ? [] : [round]));
  const run = {
    ...data,
    length,
    roundOf,
    evaluated,
    indices: devices.device.map((_, i) => i),
    spent: {
      round: rounds.cohort.map((_, round) => round + 1),
      seconds: running(seconds),
      joules: running(joules),
      bytes: running(rounds.bytes_up),
    },
    isOk: (i) => kinds[devices.status[i]] === 0,
    isSitOut: (i) => kinds[devices.status[i]] === 1,
    isRefused: (i) => kinds[devices.status[i]] === 2,
    statusOf: (i) => statuses[devices.status[i]],
    entryAt: (round, device) => index.get(`${round}/${device}`),
    timeShare: (i) => devices.time_share[i],
    energyOf: (i) => devices.compute_j[i] + devices.upload_j[i],
    bindWords: (mask) => listed(data.binds.filter((_, bit) => mask & (1 << bit))) || "nothing",
  };
  run.byDevice = groupByDevice(run);
  run.rows = chooseRows(run);
  run.rowOf = new Map(run.rows.map((device, row) => [device, row]));
  run.bindKinds = bindKinds(run);
  return run;
}

/** The entries of each device, in the order of their numbers. */
function groupByDevice(run) {
  const groups = new Map();
  for (const i of run.indices) {
    const device = run.devices.device[i];
    if (!groups.has(device)) groups.set(device, []);
    groups.get(device).push(i);
  }
  return new Map([...groups].sort(([a], [b]) => a - b));
}

/** The devices of the map: all, or those drawn most often. */
function chooseRows(run) {
  const often = [...run.byDevice].sort(([, a], [, b]) => b.length - a.length).slice(0, MOST_ROWS);
  return often.map(([device]) => device).sort((a, b) => a - b);
}

/** Which constraints held together, the most frequent first. */
function bindKinds(run) {
  const counts = new Map();
  for (const i of run.indices.filter(run.isOk)) {
    const mask = run.devices.binds[i];
    counts.set(mask, (counts.get(mask) ?? 0) + 1);
  }
  return [...counts]
    .sort(([, a], [, b]) => b - a)
    .map(([mask, times]) => ({ mask, times, words: run.bindWords(mask) }));
}

/** The first round whose metric reaches a target, or null. */
function reaches(run, target) {
  if (target === null) return null;
  const isEnough = run.metric.higher_is_better ? (value) => value >= target : (value) => value <= target;
  return run.evaluated.find((r) => isEnough(run.rounds.metric[r])) ?? null;
}

/** The best of some values of a metric, or null. */
const bestOf = (metric, values) => (values.length ? Math[metric.higher_is_better ? "max" : "min"](...values) : null);

const finalValue = (run) => (run.evaluated.length ? run.rounds.metric[run.evaluated.at(-1)] : null);
const bestValue = (run) => bestOf(run.metric, run.evaluated.map((r) => run.rounds.metric[r]));

/** A value of a metric with its unit; shares have decimals, other numbers significant digits. */
function shown(metric, value, decimals = 2) {
  if (!isNumber(value)) return "–";
  const figure = metric.factor * value;
  return `${metric.unit === "%" ? figure.toFixed(decimals) : number(figure, 4)} ${metric.unit}`.trim();
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** The mean of a column over the entries that took part. */
function meanOver(entries, column) {
  const values = entries.map((i) => column[i]).filter(isNumber);
  return values.length ? sum(values) / values.length : null;
}
