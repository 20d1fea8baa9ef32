// The page: asks for news every two seconds and hands them to the panels.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { duration, get, Guarded, isNumber, number, Panel, whole } from "./util.js";
import { FIRST } from "./ahead.js";
import { Pipeline } from "./pipeline.js";
import { Curves, SERIES } from "./curves.js";
import { Timeline } from "./timeline.js";
import { Episodes } from "./episodes.js";

const LIVE_MS = 2000, REST_MS = 10000;
const WORDS = {
  empty: "nothing yet", starting: "starting", running: "running", paused: "paused", silent: "silent",
  finished: "finished", stopped: "stopped", failed: "failed", interrupted: "interrupted", killed: "ended without closing (killed?)",
};
const ENDED = ["finished", "stopped", "failed", "interrupted", "killed"]; // outcomes of an "end" event, and where there is none

// Columns of metrics.jsonl that the page has, and how far it has them.
class Columns {
  constructor() { this.wanted = new Set(SERIES); this.clear(0); }
  clear(generation) { this.generation = generation; this.steps = []; this.values = {}; this.complete = true; }
  // True when there is something new to ask for; what is there stays until it comes.
  want(keys) {
    const before = this.wanted.size;
    keys.forEach((key) => this.wanted.add(key));
    if (this.wanted.size > before) this.complete = false;
    return this.wanted.size > before;
  }
  path(events) {
    const first = !this.generation && !this.steps.length && this.wanted.size === SERIES.length;
    const row = this.complete ? this.steps.length : 0;
    this.asked = this.wanted.size;
    if (first && !events.count) return FIRST.state;
    return `api/state?row=${row}&generation=${this.generation}&keys=${encodeURIComponent([...this.wanted].join(","))}&event=${events.count}&events=${events.generation}`;
  }
  take(metrics) {
    if (metrics.row === 0 || metrics.generation !== this.generation) this.clear(metrics.generation);
    if (metrics.row !== this.steps.length) return;
    this.complete = this.asked === this.wanted.size;
    this.steps = this.steps.concat(metrics.steps);
    for (const key of Object.keys(metrics.columns)) this.values[key] = (this.values[key] || []).concat(metrics.columns[key]);
  }
}

function useRun() {
  const columns = useRef(new Columns());
  const events = useRef({ count: 0, generation: 0, list: [] });
  const [run, setRun] = useState(null);
  const [lost, setLost] = useState("");
  const again = useRef(null);
  const server = useRef("");
  useEffect(() => {
    let timer = 0, stopped = false, busy = false;
    const ask = async () => {
      if (busy || stopped) return;
      busy = true;
      clearTimeout(timer);
      let wait = LIVE_MS;
      try {
        const state = await get(columns.current.path(events.current));
        if (server.current && server.current !== state.server) return location.reload(); // it may show another run
        server.current = state.server;
        columns.current.take(state.metrics);
        const e = events.current;
        if (state.events.generation !== e.generation || state.events.count < e.count)
          events.current = { count: state.events.count, generation: state.events.generation, list: state.events.new };
        else {
          e.list = e.list.concat(state.events.new).slice(-300);
          e.count = state.events.count;
        }
        setLost("");
        setRun({ ...state, columns: columns.current, eventList: events.current.list });
        if (ENDED.includes(state.run.state)) wait = REST_MS;
      } catch (error) {
        setLost(String(error.message || error));
        wait = REST_MS;
      }
      busy = false;
      if (!stopped && !document.hidden) timer = setTimeout(ask, wait); // a hidden page asks nothing
    };
    again.current = ask;
    const shown = () => document.hidden || ask();
    document.addEventListener("visibilitychange", shown);
    ask();
    return () => { stopped = true; clearTimeout(timer); document.removeEventListener("visibilitychange", shown); };
  }, []);
  return [run, lost, () => again.current && again.current()];
}

function Control({ run, refresh }) {
  const [said, say] = useState("");
  const [busy, setBusy] = useState(false);
  const state = run.run.state;
  if (!run.control || ENDED.includes(state)) return null;
  const send = async (name) => {
    if (name === "stop" && !confirm("Stop this run? What was trained since its last checkpoint is saved first.")) return;
    setBusy(true);
    say(`${name} …`);
    try {
      const answer = await fetch(`api/control/${name}`, { method: "POST", headers: { "x-forge-async": "control" } });
      const body = await answer.json();
      say(`${name}: ${body.outcome || body.error}`);
    } catch (error) {
      say(`${name}: ${error.message}`);
    }
    setBusy(false);
    refresh();
  };
  return html`
    <div class="control" role="group" aria-label="Control">
      ${state === "paused"
        ? html`<button disabled=${busy} onClick=${() => send("resume")}>Resume</button>`
        : html`<button disabled=${busy} onClick=${() => send("pause")}>Pause</button>`}
      <button class="danger" disabled=${busy} onClick=${() => send("stop")}>Stop</button>
      ${said && html`<span class="note" role="status">${said}</span>`}
    </div>
  `;
}

function Head({ run, refresh }) {
  const { state, started, last, seen, monarch } = run.run;
  const total = run.config.steps, step = run.metrics.last.step || 0;
  const until = ["silent", "killed"].includes(state) ? seen : ENDED.includes(state) ? last : run.now;
  const model = run.config.model && String(run.config.model);
  return html`
    <header>
      <div class="brand"><img src="static/icon.svg" alt="" width="26" height="26" /><h1 data-figure="name">${run.name}</h1>
        <span class="state ${state}" data-figure="state">${WORDS[state] || state}</span></div>
      <div class="progress" aria-label="Steps done">
        <div class="track"><div class="done" style=${{ width: `${total ? Math.min(100, (100 * step) / total) : 0}%` }}></div></div>
        <span><b data-figure="step">${whole(step)}</b>${total ? html` / ${whole(total)}` : ""} steps</span>
        ${isNumber(started) && html`<span class="note" data-figure="duration">${duration(until - started)}</span>`}
        ${model && html`<span class="note wide" title=${model}>${model.replace(/.*\//, "")}${run.config.dataset ? ` · ${run.config.dataset}` : ""}</span>`}
      </div>
      <${Control} run=${run} refresh=${refresh} />
      <nav>
        ${["pipeline", "curves", "timeline", "episodes", "events"].map((id) => html`<a href=${`#${id}`}>${id}</a>`)}
        ${monarch && html`<a href=${monarch} target="_blank" rel="noreferrer" title="Monarch's own page about its meshes">monarch</a>`}
      </nav>
    </header>
  `;
}

const QUIET = new Set(["kind", "at", "t", "n"]);
function Events({ list, count, kinds }) {
  const [kind, setKind] = useState("");
  const shown = list.filter((event) => !kind || event.kind === kind).slice(-100).reverse();
  const tools = html`<select aria-label="Kind of event" onChange=${(e) => setKind(e.target.value)}>
    <option value="">all kinds</option>
    ${Object.keys(kinds).sort().map((name) => html`<option value=${name} selected=${name === kind}>${name} (${kinds[name]})</option>`)}
  </select>`;
  return html`
    <${Panel} id="events" title="Events" note=${`${whole(count)} in all`} tools=${tools}>
      <ol class="events">
        ${shown.map((event) => html`
          <li key=${event.n}><time>${duration(event.t)}</time><b>${event.kind}</b>
            <span>${Object.entries(event).filter(([k]) => !QUIET.has(k)).map(([k, v]) => html`<i>${k}</i> ${brief(v)}  `)}</span></li>`)}
        ${!shown.length && html`<li class="note">No event yet.</li>`}
      </ol>
    </${Panel}>
  `;
}

function brief(value) {
  if (typeof value === "number") return number(value, 4);
  if (typeof value === "string") return /^[0-9a-f]{20,}$/.test(value) ? value.slice(0, 8) : value;
  return JSON.stringify(value);
}

function App() {
  const [run, lost, refresh] = useRun();
  useEffect(() => { if (run) document.title = `${run.name} · forge_async`; }, [run && run.name]);
  if (!run) return html`<main><p class="empty">${lost ? `The dashboard does not answer: ${lost}` : "Reading the run folder …"}</p></main>`;
  const broken = Object.entries(run.broken), live = ![...ENDED, "silent"].includes(run.run.state);
  return html`
    <${Head} run=${run} refresh=${refresh} />
    <main>
      ${lost && html`<p class="warning" role="alert">The dashboard does not answer any more (${lost}). If its run has ended, open the folder again with <code>forge-async dashboard ${run.name}</code>.</p>`}
      ${run.run.state === "empty" && html`<p class="warning">There is no event in this folder: the run has not begun, or it is not a run's folder.</p>`}
      ${run.run.state === "killed" && html`<p class="warning">The process of this run is gone and has not ended it: it was killed, or its notebook's kernel was closed. What is shown is the last that it told; <code>resume=</code> with this folder goes on from its last checkpoint, if it saved one.</p>`}
      ${run.run.state === "silent" && html`<p class="warning">Nothing was written for a while and the run has not ended: it may have been killed.</p>`}
      ${broken.length > 0 && html`<p class="warning">Lines that are not readable were left out: ${broken.map(([file, n]) => `${n} of ${file}`).join(", ")}.</p>`}
      <${Guarded} id="pipeline" title="Pipeline"><${Pipeline} run=${run} live=${live} /></${Guarded}>
      <${Guarded} id="curves" title="Curves"><${Curves} run=${run} refresh=${refresh} missing=${run.missing.includes("metrics.jsonl")} /></${Guarded}>
      <${Guarded} id="timeline" title="Timeline"><${Timeline} size=${run.spans} missing=${run.missing.includes("spans.jsonl")} /></${Guarded}>
      <${Guarded} id="episodes" title="Episodes"><${Episodes} count=${`${run.episodes.generation}/${run.episodes.count}`} missing=${run.missing.includes("episodes.jsonl")} /></${Guarded}>
      <${Guarded} id="events" title="Events"><${Events} list=${run.eventList} count=${run.events.count} kinds=${run.events.kinds} /></${Guarded}>
    </main>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
