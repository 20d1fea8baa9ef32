// Numbers as text, requests, and small hooks that all panels use.
import { html, useEffect, useErrorBoundary, useRef, useState } from "./vendor/htm-preact.js";
import { answerTo } from "./ahead.js";

export async function get(path) {
  const answer = await answerTo(path);
  const body = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error || `status ${answer.status}`);
  return body;
}

const OFTEN_MS = 4000, SELDOM_MS = 20000;

export const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

export function number(x, digits = 3) {
  if (!isNumber(x)) return "–";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) return x.toExponential(1);
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toFixed(digits));
}

export const whole = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : "–");
export const percent = (x) => (isNumber(x) ? `${Math.round(x * 100)}%` : "–");

export function bytes(x) {
  if (!isNumber(x)) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  while (x >= 1000 && i < units.length - 1) (x /= 1000), i++;
  return `${x >= 100 || i === 0 ? Math.round(x) : x.toFixed(1)} ${units[i]}`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Neighbouring versions have different hues; six are told apart more easily than a scale of many.
export const versionClass = (version) => `v${((version % 6) + 6) % 6}`;

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Counts up when the colour scheme changes: what is drawn on a canvas is drawn again.
export function useScheme() {
  const [count, set] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => set((n) => n + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return count;
}

export function useSize() {
  const ref = useRef(null);
  const [size, set] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) =>
      set({ width: Math.floor(entry.contentRect.width), height: Math.floor(entry.contentRect.height) }),
    );
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, size];
}

// The value as of a few seconds ago at most while the element is in sight, or nearly; else it is renewed once in a while.
// For what a panel asks for whenever the value changes.
export function useInSight(ref, value) {
  const [inSight, set] = useState(true);
  const [kept, keep] = useState({ value, at: Date.now() });
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => set(entries.at(-1).isIntersecting), { rootMargin: "100px" });
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const due = kept.at + (inSight ? OFTEN_MS : SELDOM_MS) - Date.now();
    const timer = setTimeout(() => keep({ value, at: Date.now() }), Math.max(0, due));
    return () => clearTimeout(timer);
  }, [value, inSight]);
  return kept.value;
}

export const Panel = ({ id, title, note, tools, children, box }) => html`
  <section id=${id} class="panel" aria-label=${title} ref=${box}>
    <div class="panel-head">
      <h2>${title}</h2>
      ${note && html`<span class="note">${note}</span>`}
      ${tools && html`<div class="tools">${tools}</div>`}
    </div>
    ${children}
  </section>
`;

// What cannot be drawn (files of another version, half of a file) takes no other panel with it.
export function Guarded({ id, title, children }) {
  const [error, again] = useErrorBoundary();
  useEffect(() => {
    if (!error) return;
    const timer = setTimeout(again, 2000);
    return () => clearTimeout(timer);
  }, [error]);
  return error ? html`<${Panel} id=${id} title=${title}><p class="empty">This panel cannot be drawn: ${error.message}</p></${Panel}>` : children;
}

// A box beside the pointer that stays inside the window.
export function Tip({ at, children }) {
  const ref = useRef(null);
  useEffect(() => {
    const box = ref.current;
    if (!box || !at) return;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.x + 14), innerWidth - width - 8);
    const top = at.y + 18 + height > innerHeight - 8 ? at.y - height - 14 : at.y + 18;
    box.style.left = `${left}px`;
    box.style.top = `${Math.max(8, top)}px`;
    box.style.visibility = "visible";
  });
  return at && html`<div class="tip" role="tooltip" ref=${ref}>${children}</div>`;
}

export const Rows = ({ of }) => html`
  <dl class="rows">${of.filter(Boolean).map(([name, value, key]) => html`<div><dt>${name}</dt><dd data-figure=${key}>${value}</dd></div>`)}</dl>
`;
