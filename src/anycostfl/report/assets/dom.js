// Build elements and format numbers. Text is only ever inserted as text nodes.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with this many significant digits. */
function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

/** A whole number. */
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });

/** "1 round", "2 rounds". */
const counted = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

const percent = (share, decimals = 1) => (isNumber(share) ? `${(100 * share).toFixed(decimals)} %` : "–");

const UNITS = {
  round: [["", 1]],
  seconds: [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3]],
  joules: [["MJ", 1e6], ["kJ", 1e3], ["J", 1], ["mJ", 1e-3]],
  bytes: [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]],
};

/** The largest unit of which a value is at least one; two of minutes and hours. */
function unitFor(kind, value) {
  const least = kind === "seconds" ? 2 : 1;
  return UNITS[kind].find(([, size]) => Math.abs(value) >= least * size) ?? UNITS[kind].at(-1);
}

/** A quantity with its unit, such as "3.2 kJ". */
function amount(kind, value, digits = 3) {
  if (!isNumber(value)) return "–";
  if (value === 0) return `0 ${kind === "bytes" ? "B" : kind === "joules" ? "J" : "s"}`;
  const [unit, size] = unitFor(kind, value);
  return `${number(value / size, digits)} ${unit}`;
}

/** Names in a sentence: "a, b and c". */
function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** The value below which a share of the sorted values lies. */
function quantile(sorted, share) {
  if (!sorted.length) return null;
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  const high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** A table in a scrollable box; the first column names the row. */
function table(caption, columns, rows, words = []) {
  const side = (index) => (index === 0 || words.includes(index) ? { class: "words" } : {});
  const head = columns.map((title, i) => make("th", { scope: "col", ...side(i) }, title));
  const body = make("tbody");
  for (const row of rows) {
    const cells = row.map((cell, i) =>
      make(i ? "td" : "th", { ...(i ? {} : { scope: "row" }), ...side(i) }, cell));
    body.append(make("tr", {}, ...cells));
  }
  const view = make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...head)), body);
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, view);
}

/** One choice of several, as radio buttons. */
function choice(legend, options, chosen, onChange) {
  const set = make("fieldset", { class: "switch" }, make("legend", { class: "hidden" }, legend));
  const name = `choice-${legend.replaceAll(/\W+/g, "-")}`;
  for (const [value, label] of options) {
    const input = make("input", { type: "radio", name, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => onChange(value));
    set.append(make("label", {}, input, label));
  }
  return set;
}

const chip = (colour) => {
  const mark = make("span", { class: "chip", "aria-hidden": "true" });
  mark.style.background = colour;
  return mark;
};

/** The meaning of colours. */
function legend(entries) {
  return make("ul", { class: "legend" }, ...entries.map(([colour, label]) => make("li", {}, chip(colour), label)));
}

/** A bar of several parts; its values are given as text beside it. */
function meter(parts) {
  const bar = make("span", { class: "meter", "aria-hidden": "true" });
  for (const [share, colour] of parts) {
    const part = make("i");
    part.style.width = `${100 * share}%`;
    part.style.background = colour;
    bar.append(part);
  }
  return bar;
}

/** A colour of the style sheet as the theme has it now. */
function colour(name) {
  const probe = make("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const isDark = () => {
  const asked = document.documentElement.dataset.theme;
  return asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

const HUES = [
  ["#0f6b78", "#57bcc8"], ["#c9741a", "#e8a24f"], ["#6d4fa3", "#b79cec"], ["#4f8a2f", "#93cc6c"],
  ["#b03a6f", "#f08cb8"], ["#2f62b5", "#86b0f5"], ["#7a5c3e", "#c9a986"], ["#68727b", "#a7b1ba"],
];

/** The colour of one of several things side by side. */
const hue = (index) => HUES[index % HUES.length][isDark() ? 1 : 0];
