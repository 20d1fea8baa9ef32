// Curves over optimizer steps. Dragging zooms all of them; a double click shows everything again.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { css, isNumber, number, Panel, percent, useScheme, useSize } from "./util.js";

const CHARTS = [
  { title: "Reward", keys: { reward: ["mean", "--train"] }, smooth: "reward" },
  { title: "Loss", keys: { "train/loss": ["loss", "--generate"], "train/grad_norm": ["gradient norm", "--publish", "right"] } },
  { title: "Importance ratio", keys: { "train/ratio_mean": ["mean", "--pull"], "train/ratio_max": ["max", "--swap"] } },
  { title: "Staleness", note: "versions", keys: { staleness_mean: ["mean", "--generate"], staleness_max: ["max", "--faint", "step"] }, zero: true },
  { title: "Throughput", note: "tokens/s", keys: { "tokens_per_s/generated": ["generated", "--generate"], "tokens_per_s/trained": ["trained", "--train"] }, zero: true },
  { title: "Idle", note: "share", keys: { "idle/trainer": ["trainer", "--train"], "idle/generator_0": ["generator 0", "--generate"] }, zero: true, percent: true },
];
export const SERIES = CHARTS.flatMap((chart) => Object.keys(chart.keys));
const TONES = ["--train", "--generate", "--pull", "--publish", "--swap", "--reward"];

function smoothed(values) {
  const half = Math.max(1, Math.floor(values.length / 20));
  const sums = [0], counts = [0];
  values.forEach((v, i) => { sums.push(sums[i] + (isNumber(v) ? v : 0)); counts.push(counts[i] + (isNumber(v) ? 1 : 0)); });
  return values.map((_, i) => {
    const a = Math.max(0, i - half), b = Math.min(values.length, i + half + 1), n = counts[b] - counts[a];
    return n ? (sums[b] - sums[a]) / n : null;
  });
}

const shared = uPlot.sync("steps");
const zoom = { range: null, listeners: new Set() };
function zoomTo(range) { zoom.range = range; zoom.listeners.forEach((listener) => listener()); }

function Chart({ chart, columns, tick }) {
  const [box, { width }] = useSize();
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const scheme = useScheme();
  const names = Object.keys(chart.keys);
  const withSmooth = chart.smooth && columns.steps.length >= 8;
  const data = () => {
    const own = names.map((key) => columns.values[key] || columns.steps.map(() => null));
    return [columns.steps, ...own, ...(withSmooth ? [smoothed(own[0])] : [])];
  };
  useEffect(() => {
    if (!width || !columns.steps.length) return;
    const grid = { stroke: css("--line"), width: 1 }, ink = css("--faint");
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui", size: 44, gap: 4 };
    const few = columns.steps.length < 60;
    const series = names.map((key) => {
      const [label, tone, extra] = chart.keys[key];
      const faint = withSmooth && key === chart.smooth;
      return {
        label, stroke: css(tone), alpha: faint ? 0.35 : 1, width: faint ? 1 : 1.6, scale: extra === "right" ? "right" : "y",
        points: { show: few && !faint, size: 4, fill: css("--card") }, ...(extra === "step" ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
      };
    });
    if (withSmooth) series.push({ label: "smoothed", stroke: css(chart.keys[names[0]][1]), width: 2.2, points: { show: false } });
    const right = series.some((s) => s.scale === "right");
    const span = (low, high) => {
      if (!isNumber(low)) return [0, 1];
      if (chart.percent) return [0, Math.max(1, high)];
      const pad = (high - low || Math.abs(high) || 1) * 0.08;
      return [chart.zero ? Math.min(0, low) : low - pad, high + pad];
    };
    const options = {
      width, height: 170, padding: [8, right ? 0 : 10, 0, 0], legend: { show: false }, series: [{}, ...series],
      scales: { x: { time: false }, y: { range: (_, a, b) => span(a, b) }, ...(right ? { right: { range: (_, a, b) => span(a, b) } } : {}) },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? t : "")) },
        { ...axis, values: (_, ticks) => ticks.map((t) => (chart.percent ? percent(t) : number(t))) },
        ...(right ? [{ ...axis, scale: "right", side: 1, grid: { show: false }, values: (_, ticks) => ticks.map((t) => number(t)) }] : []),
      ],
      cursor: { sync: { key: shared.key, setSeries: false }, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
      hooks: {
        setCursor: [(u) => setAt(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
    const made = new uPlot(options, data(), box.current);
    const apply = () => {
      const steps = columns.steps;
      made.setScale("x", zoom.range ? { min: zoom.range[0], max: zoom.range[1] } : { min: steps[0] - (steps.length === 1), max: steps[steps.length - 1] + (steps.length === 1) });
    };
    made.over.addEventListener("dblclick", () => zoomTo(null));
    zoom.listeners.add(apply);
    apply();
    plot.current = { made, apply };
    return () => { zoom.listeners.delete(apply); made.destroy(); plot.current = null; };
  }, [width, scheme, columns.steps.length === 0, columns.steps.length < 60, withSmooth, names.join()]);
  useEffect(() => {
    if (!plot.current) return;
    plot.current.made.setData(data(), false);
    plot.current.apply();
  }, [tick]);
  const index = isNumber(at) ? at : columns.steps.length - 1;
  return html`
    <figure class="chart" data-chart=${chart.title.toLowerCase()}>
      <figcaption><b>${chart.title}</b>${chart.note && html`<span class="note">${chart.note}</span>`}
        <span class="values">${names.map((key) => html`<span style=${{ color: `var(${chart.keys[key][1]})` }}><i></i>${chart.keys[key][0]} <b data-figure=${key}>${chart.percent ? percent((columns.values[key] || [])[index]) : number((columns.values[key] || [])[index])}</b></span>`)}
          ${isNumber(at) && html`<span class="note">step ${columns.steps[at]}</span>`}</span>
      </figcaption>
      <div ref=${box} class="plot"></div>
    </figure>
  `;
}

export function Curves({ run, refresh, missing }) {
  const { columns } = run;
  const [more, setMore] = useState([]);
  const [zoomed, setZoomed] = useState(false);
  useEffect(() => {
    const listener = () => setZoomed(!!zoom.range);
    zoom.listeners.add(listener);
    return () => zoom.listeners.delete(listener);
  }, []);
  const generators = run.metrics.keys.filter((key) => /^idle\/generator_[1-9]/.test(key));
  useEffect(() => { if (columns.want([...generators, ...more])) refresh(); }, [generators.length, more.length]);
  const idle = CHARTS.find((chart) => chart.title === "Idle");
  const charts = CHARTS.map((chart) => chart !== idle || !generators.length ? chart : { ...idle, keys: { ...idle.keys, ...Object.fromEntries(generators.map((key, i) => [key, [key.slice(5).replace("_", " "), TONES[(i + 2) % TONES.length]]])) } });
  const others = run.metrics.keys.filter((key) => key !== "at" && !more.includes(key) && !SERIES.includes(key));
  const add = (key) => { if (!key) return; setMore([...more, key]); };
  const tools = html`
    ${zoomed && html`<button onClick=${() => zoomTo(null)}>Show all steps</button>`}
    <select aria-label="Add a series" value="" onChange=${(e) => { add(e.target.value); e.target.value = ""; }}>
      <option value="">Add a series …</option>${others.map((key) => html`<option value=${key}>${key}</option>`)}
    </select>`;
  return html`
    <${Panel} id="curves" title="Curves" note="drag to zoom" tools=${columns.steps.length ? tools : null}>
      ${columns.steps.length
        ? html`<div class="charts">
            ${charts.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} columns=${columns} tick=${run.now} />`)}
            ${more.map((key, i) => html`<${Chart} key=${key} chart=${{ title: key, keys: { [key]: ["", TONES[i % TONES.length]] } }} columns=${columns} tick=${run.now} />`)}
          </div>`
        : html`<p class="empty">${missing ? "There is no metrics.jsonl: no step was logged yet, or metrics.jsonl is false." : "No step was logged yet."}</p>`}
    </${Panel}>
  `;
}
