// Read the data, build the sections, keep them up to date.

const POLL_MS = 1500;

const state = { runs: [], chosen: 0 };

/** The runs packed into this file. */
async function unpack() {
  const packed = Uint8Array.from(atob(byId("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

function build() {
  const ofAll = [remarksSection(), overviewSection(), metricSection()];
  ofAll.push(runChooser((chosen) => { state.chosen = chosen; show(); }));
  const ofOne = [whoSection(), strategySection(), boundSection(), budgetsSection(), whereSection(), absentSection(), devicesSection()];
  ofAll.push(widthsSection(), configSection());
  return () => {
    ofAll.forEach((update) => update(state));
    ofOne.forEach((update) => update(state.runs[state.chosen]));
    showTitle();
  };
}

function showTitle() {
  const { runs } = state;
  const [run] = runs;
  const title = runs.length > 1 ? `${runs.length} runs compared` : run.title || run.name;
  byId("title").textContent = title;
  document.title = `${title} – anycostfl`;
  showState();
}

function showState() {
  const { runs } = state;
  const progress = (run) => (run.planned ? `${count(run.length)} of ${counted(run.planned, "round")}` : counted(run.length, "round"));
  const words = runs.map((run) => (runs.length > 1 ? `${run.name}: ${progress(run)}` : `${run.name}, method ${run.summary.method}, ${progress(run)}`)).join(" · ");
  byId("state").replaceChildren(words);
}

/** The theme follows the system until the reader says otherwise. */
function watchTheme() {
  const button = byId("theme");
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
  try {
    const kept = localStorage.getItem("anycostfl-theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* a browser that keeps nothing for files */ }
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("anycostfl-theme", theme); } catch { /* as above */ }
    label();
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); show(); });
  label();
}

/** Poll the server while the page is visible. */
function follow() {
  let tag = "";
  const note = byId("state").parentElement.appendChild(make("p", { class: "brand live" }));
  const ask = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        state.runs = (await answer.json()).map(readRun);
        show();
      }
      note.replaceChildren(make("span", { class: "pulse" }), liveWords());
    } catch {
      note.replaceChildren("The server has stopped; this is the last data it sent.");
    }
  };
  const again = async () => { await ask(); setTimeout(again, POLL_MS); };
  again();
  document.addEventListener("visibilitychange", ask);
}

function liveWords() {
  const done = state.runs.every((run) => run.planned && run.length >= run.planned);
  if (done) return "Finished.";
  const newest = Math.max(...state.runs.map((run) => run.written ?? 0));
  return `Live; the last round came ${amount("seconds", Math.max(0, Math.round(Date.now() / 1000 - newest)))} ago.`;
}

let show = () => {};

async function start() {
  state.runs = (await unpack()).map(readRun);
  watchTheme();
  show = build();
  show();
  if (document.documentElement.dataset.mode === "live") follow();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  byId("state").textContent = `This page cannot show its data: ${error.message}`;
  throw error;
});
