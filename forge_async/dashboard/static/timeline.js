// What every actor was doing, lane by lane. The wheel or the buttons zoom, dragging moves, a double click shows all.
import { html, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { css, duration, get, Panel, Tip, useInSight, useScheme, useSize } from "./util.js";
import { FIRST } from "./ahead.js";

const LANE = 24, GAP = 6, AXIS = 22;
const JOIN_S = 0.005, MANY = 1000; // spans that are added before all of the window is asked for again, as pixels show less
const KNOWN = ["generate", "swap", "pull", "attest", "train", "publish", "reward", "checkpoint", "data", "forward", "logprobs", "reference",
  "backward", "clip", "optimizer", "wait", "hold"];

function ticksOf(start, end, count) {
  const rough = (end - start) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let t = Math.ceil(start / step) * step; t <= end; t += step) ticks.push(t);
  return [ticks, step];
}

// Puts what is new at the ends of the lanes; what the controller's questions have cut is one again.
function add(data, found) {
  const lanes = new Map(data.lanes.map((lane) => [lane.lane, lane.spans]));
  const joined = (before, after) => {
    const [last, first] = [before[before.length - 1], after[0]];
    if (!last || !first || last[0] !== first[0] || last[3] !== first[3]) return before.concat(after);
    const gap = first[1] - last[1] - last[2];
    if (gap < 0 || gap >= JOIN_S) return before.concat(after);
    return [...before.slice(0, -1), [last[0], last[1], first[1] + first[2] - last[1], last[3], last[4]], ...after.slice(1)];
  };
  return { ...found, lanes: found.lanes.map((lane) => ({ ...lane, spans: joined(lanes.get(lane.lane) || [], lane.spans) })) };
}

export function Timeline({ size, missing }) {
  const [box, { width }] = useSize();
  const canvas = useRef(null);
  const [data, setData] = useState(null);
  const [view, setView] = useState(null); // null: all there is
  const [tip, setTip] = useState(null);
  const [failed, setFailed] = useState("");
  const [tries, setTries] = useState(0);
  const drag = useRef(null), pending = useRef(0), asked = useRef(0), waiting = useRef(""), missed = useRef(false), had = useRef(null), added = useRef(0), panel = useRef(null);
  const fresh = useInSight(panel, size);
  const scheme = useScheme();
  const labels = width < 520 ? 0 : 116;
  const plot = Math.max(1, width - labels);

  // Of a window that it has, only what is new.
  const ask = async (path) => {
    missed.current = waiting.current === path; // the answer may take longer than until it is asked for again
    if (missed.current) return;
    waiting.current = path;
    const mine = ++asked.current, has = had.current;
    const more = has && has.path === path && has.count && added.current < MANY;
    try {
      const found = await get(path + (more ? `&after=${has.count}&generation=${has.generation}` : ""));
      if (mine !== asked.current) return;
      added.current = found.adds ? added.current + found.count - has.count : 0;
      had.current = { ...(found.adds ? add(has, found) : found), path };
      setData(had.current);
      setFailed("");
      if (missed.current) load(); // there is more by now, and it may have been the last
    } catch (error) { setFailed(error.message); setTries((n) => n + 1); }
    finally { if (mine === asked.current) waiting.current = ""; }
  };
  const windowed = `api/timeline?pixels=${Math.round(plot)}${view ? `&start=${view[0]}&end=${view[1]}` : ""}`;
  const load = useCallback(() => {
    clearTimeout(pending.current);
    pending.current = setTimeout(() => ask(windowed), 60);
  }, [windowed]);
  useEffect(() => { ask(FIRST.timeline); }, []); // how wide it is shows later
  useEffect(() => { if (data) load(); }, [load, !data]);
  useEffect(() => {
    if (!tries) return;
    const timer = setTimeout(() => (document.hidden ? setTries((n) => n + 1) : load()), 2000);
    return () => clearTimeout(timer);
  }, [tries]);
  useEffect(() => { if (data) ask(windowed); }, [fresh]);

  const any = data && data.lanes.length > 0;
  const shown = any ? view || [data.first, Math.max(data.last, data.first + 1e-3)] : null;
  const height = any ? AXIS + data.lanes.length * (LANE + (labels ? GAP : GAP + 13)) : 0;
  const laneTop = (i) => AXIS + i * (LANE + (labels ? GAP : GAP + 13)) + (labels ? 0 : 13);
  const xOf = (t) => labels + ((t - shown[0]) / (shown[1] - shown[0])) * plot;

  useEffect(() => {
    if (!any || !canvas.current || !width) return;
    const ratio = devicePixelRatio || 1, c = canvas.current, g = c.getContext("2d");
    c.width = width * ratio; c.height = height * ratio;
    g.scale(ratio, ratio);
    g.clearRect(0, 0, width, height);
    const colour = Object.fromEntries(KNOWN.map((name) => [name, css(`--${name}`)]));
    const other = css("--faint");
    g.font = "11px system-ui, sans-serif";
    const [ticks, step] = ticksOf(shown[0] - data.first, shown[1] - data.first, Math.max(2, plot / 110));
    g.textBaseline = "middle";
    for (const t of ticks) {
      const x = Math.round(xOf(t + data.first)) + 0.5;
      g.strokeStyle = css("--line");
      g.beginPath(); g.moveTo(x, AXIS - 4); g.lineTo(x, height); g.stroke();
      g.fillStyle = css("--faint");
      g.fillText(tickText(t, step), Math.min(x + 3, width - 44), 9);
    }
    data.lanes.forEach((lane, i) => {
      const y = laneTop(i);
      g.fillStyle = css("--ink");
      if (labels) g.fillText(lane.lane, 0, y + LANE / 2, labels - 8);
      else g.fillText(lane.lane, 0, y - 7);
      g.save();
      g.beginPath(); g.rect(labels, y, plot, LANE); g.clip();
      g.fillStyle = css("--lane");
      g.fillRect(labels, y, plot, LANE);
      for (const [name, at, seconds, version] of lane.spans) {
        const x = xOf(at), w = Math.max(data.names[name] === "swap" ? 2 : 0.6, xOf(at + seconds) - x);
        if (x > width || x + w < labels) continue;
        const word = data.names[name], quiet = word === "wait" || word === "hold";
        g.fillStyle = colour[word] || other;
        g.fillRect(x, quiet ? y + LANE / 2 - 1 : y, w, quiet ? 2 : LANE);
        if (w > 3 && !quiet) { g.fillStyle = css("--lane"); g.fillRect(x + w - 0.5, y, 0.5, LANE); }
        if (w > 46 && !quiet) {
          g.fillStyle = css("--on-span");
          g.fillText(version >= 0 && w > 84 ? `${word} v${version}` : word, Math.max(x, labels) + 5, y + LANE / 2, w - 8);
        }
      }
      g.restore();
    });
  }, [data, width, height, scheme, shown && shown[0], shown && shown[1]]);

  const clampView = (start, end) => {
    const least = 1e-4, all = data.last - data.first;
    const size = Math.min(Math.max(end - start, least), all * 1.02);
    const from = Math.min(Math.max(start, data.first - size * 0.05), data.last + size * 0.05 - size);
    return size >= all ? null : [from, from + size];
  };
  const zoomAt = (factor, x = labels + plot / 2) => {
    if (!any) return;
    const t = shown[0] + ((x - labels) / plot) * (shown[1] - shown[0]);
    setView(clampView(t - (t - shown[0]) * factor, t + (shown[1] - t) * factor));
  };
  useEffect(() => { // not passive, as the page must not scroll while the wheel zooms
    const c = canvas.current;
    if (!c) return;
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && Math.abs(event.deltaY) < 1) return;
      if (!event.ctrlKey && !event.metaKey && !c.matches(":focus")) return;
      event.preventDefault();
      zoomAt(Math.exp(event.deltaY * 0.002), event.offsetX);
    };
    c.addEventListener("wheel", wheel, { passive: false });
    return () => c.removeEventListener("wheel", wheel);
  });
  const spanAt = (x, y) => {
    const i = data.lanes.findIndex((_, k) => y >= laneTop(k) && y < laneTop(k) + LANE);
    if (i < 0 || x < labels) return null;
    const t = shown[0] + ((x - labels) / plot) * (shown[1] - shown[0]), slack = (2 * (shown[1] - shown[0])) / plot;
    let best = null;
    for (const span of data.lanes[i].spans) {
      const off = Math.max(span[1] - t, t - span[1] - span[2], 0);
      if (off <= slack && (!best || off < best.off)) best = { off, span, lane: data.lanes[i].lane };
    }
    return best;
  };
  const move = (event) => {
    if (drag.current) {
      const dt = ((event.clientX - drag.current.x) / plot) * (shown[1] - shown[0]);
      if (Math.abs(event.clientX - drag.current.x) > 3) setView(clampView(drag.current.start - dt, drag.current.end - dt));
      return;
    }
    const hit = spanAt(event.offsetX, event.offsetY);
    setTip(hit && { x: event.clientX, y: event.clientY, hit });
  };
  const keys = (event) => {
    const size = shown && shown[1] - shown[0];
    const act = { "+": () => zoomAt(0.5), "=": () => zoomAt(0.5), "-": () => zoomAt(2), 0: () => setView(null),
      ArrowLeft: () => setView(clampView(shown[0] - size / 5, shown[1] - size / 5)), ArrowRight: () => setView(clampView(shown[0] + size / 5, shown[1] + size / 5)) }[event.key];
    if (any && act) { event.preventDefault(); act(); }
  };
  const last = (seconds) => any && setView(clampView(data.last - seconds, data.last));
  const tools = any && html`
    <button onClick=${() => zoomAt(0.5)} aria-label="Zoom in">+</button>
    <button onClick=${() => zoomAt(2)} aria-label="Zoom out">−</button>
    <button onClick=${() => last(60)}>last minute</button>
    <button onClick=${() => last(10)}>last 10 s</button>
    <button onClick=${() => setView(null)} disabled=${!view}>all</button>`;
  const used = any ? KNOWN.filter((name) => data.names.includes(name)) : [];
  return html`
    <${Panel} box=${panel} id="timeline" title="Timeline" note=${any ? `${duration(shown[1] - shown[0])} shown` : ""} tools=${tools}>
      <div ref=${box} class="timeline">
        ${any
          ? html`<canvas ref=${canvas} tabindex="0" aria-label="Timeline: drag to move, click and use the wheel, or + and -, to zoom" style=${{ width: `${width}px`, height: `${height}px` }}
              onPointerDown=${(e) => { drag.current = { x: e.clientX, start: shown[0], end: shown[1] }; e.target.setPointerCapture(e.pointerId); e.target.focus({ preventScroll: true }); setTip(null); }}
              onPointerUp=${() => { drag.current = null; }} onPointerCancel=${() => { drag.current = null; }} onPointerMove=${move} onPointerLeave=${() => setTip(null)}
              onDblClick=${() => setView(null)} onKeyDown=${keys}></canvas>`
          : html`<p class="empty">${failed || (missing ? "There is no spans.jsonl: metrics.status_every_s is 0, or nothing has begun." : "No span yet.")}</p>`}
      </div>
      ${any && html`<p class="legend">${used.map((name) => html`<span><i style=${{ background: `var(--${name})` }}></i>${name}</span>`)}</p>`}
      <${Tip} at=${tip}>${tip && html`<b>${data.names[tip.hit.span[0]]}</b>${tip.hit.span[3] >= 0 ? html` <span class="chip">v${tip.hit.span[3]}</span>` : ""}<br />
        ${tip.hit.lane}<br />${duration(tip.hit.span[2])} at ${duration(tip.hit.span[1] - data.first)}${tip.hit.span[4] > 1 ? html`<br />${tip.hit.span[4]} together` : ""}`}</${Tip}>
    </${Panel}>
  `;
}

function tickText(t, step) {
  if (step < 1) return `${t.toFixed(Math.min(6, Math.ceil(-Math.log10(step))))} s`;
  const s = Math.round(t);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}` : `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, "0")} h`;
}
