// The list of recorded episodes, of which only the rows in sight exist, and the reader of one.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { get, isNumber, number, Panel, Tip, useInSight, useSize, versionClass, whole } from "./util.js";

const ROW = 40, PAGE = 50, AGAIN_MS = 2000;

// The pages of one question, all of the same first `all` episodes of the file: rows that are added meanwhile would shift
// what comes after them.
const question = (number, query) => ({ number, query, pages: new Map(), total: 0, all: null });

function useList(query, count) {
  const shown = useRef(question(0, query)), asked = useRef(shown.current), sight = useRef([0, 0]);
  const [state, set] = useState({ tick: 0, failed: "" });
  const failed = (error, again) => {
    set((s) => ({ ...s, failed: error.message }));
    const later = () => setTimeout(() => (document.hidden ? later() : again()), AGAIN_MS);
    later();
  };
  const load = async (of, page) => {
    of.pages.set(page, null);
    const found = await get(`api/episodes?start=${page * PAGE}&count=${PAGE}&${of.query}${of.all === null ? "" : `&of=${of.all}`}`);
    Object.assign(of, { total: found.total, all: found.all });
    of.pages.set(page, found.rows);
  };
  // What is shown stays until the answer to a newer question is there.
  const ask = async () => {
    const own = (asked.current = question(asked.current.number + 1, query));
    try {
      for (const page of sight.current) if (!own.pages.has(page) && (own.all === null || page * PAGE < own.total)) await load(own, page);
    } catch (error) {
      if (own === asked.current) failed(error, () => own === asked.current && ask());
      return;
    }
    if (own.query !== asked.current.query || own.number < shown.current.number) return; // of an earlier one
    shown.current = own;
    set((s) => ({ tick: s.tick + 1, failed: "" }));
  };
  useEffect(() => { ask(); }, [query, count]);
  const need = (first, last) => {
    const own = shown.current, from = Math.floor(first / PAGE), to = Math.floor(Math.max(first, last - 1) / PAGE);
    sight.current = [from, to];
    if (own.all === null) return;
    for (let page = from; page <= to; page++) {
      if (own.pages.has(page)) continue;
      load(own, page).then(
        () => own === shown.current && set((s) => ({ tick: s.tick + 1, failed: "" })),
        (error) => {
          own.pages.delete(page);
          if (own === shown.current) failed(error, () => set((s) => ({ ...s, tick: s.tick + 1 })));
        },
      );
    }
  };
  const row = (i) => { const page = shown.current.pages.get(Math.floor(i / PAGE)); return page && page[i % PAGE]; };
  return { ...state, total: shown.current.total, all: shown.current.all || 0, row, need };
}

function List({ list, chosen, choose }) {
  const [box, { height }] = useSize();
  const [top, setTop] = useState(0);
  const first = Math.max(0, Math.floor(top / ROW) - 6), last = Math.min(list.total, Math.ceil((top + height) / ROW) + 6);
  useEffect(() => list.need(first, last), [first, last, list.total, list.tick]);
  const rows = [];
  for (let i = first; i < last; i++) rows.push([i, list.row(i)]);
  const keys = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    let at = -1;
    for (let i = first; i < last; i++) if (list.row(i) && list.row(i)[0] === chosen) at = i;
    const next = Math.min(list.total - 1, Math.max(0, at + step)), row = list.row(next);
    if (!row) return;
    choose(row[0]);
    const view = box.current;
    if (next * ROW < view.scrollTop) view.scrollTop = next * ROW;
    if ((next + 1) * ROW > view.scrollTop + height) view.scrollTop = (next + 1) * ROW - height;
  };
  return html`
    <div class="list" ref=${box} tabindex="0" role="listbox" aria-label="Episodes" onScroll=${(e) => setTop(e.currentTarget.scrollTop)} onKeyDown=${keys}>
      <div style=${{ height: `${list.total * ROW}px`, position: "relative" }}>
        ${rows.map(([i, row]) => html`
          <div key=${row ? row[0] : `at ${i}`} class="item ${row && row[0] === chosen ? "chosen" : ""}" role="option" aria-selected=${!!row && row[0] === chosen} style=${{ top: `${i * ROW}px` }} onClick=${() => row && choose(row[0])}>
            ${row ? html`<span class="step">${whole(row[1])}</span><span class="id">${row[2]}</span>
              <span class="versions">${row[5] === row[6] ? html`<i class="chip ${versionClass(row[5])}">v${row[5]}</i>` : html`<i class="chip ${versionClass(row[5])}">v${row[5]}</i><i class="chip ${versionClass(row[6])}">v${row[6]}</i>`}</span>
              <span class="count">${whole(row[4])}</span><span class="reward">${number(row[3], 2)}</span>` : html`<span class="note">…</span>`}
          </div>`)}
      </div>
    </div>
  `;
}

// Runs of [value, length] as one value per token.
const spread = (runs) => (runs || []).flatMap(([value, length]) => Array(length).fill(value));

const MODES = { version: "version", logprob: "log-prob", ratio: "ratio", mask: "mask" };

function shade(mode, token) {
  if (mode === "version") return { class: versionClass(token.version) };
  if (mode === "mask") return { class: token.trained === 0 ? "masked" : token.trained === 1 ? "kept" : "" };
  const value = mode === "logprob" ? token.logprob : token.ratio;
  if (!isNumber(value)) return { class: "" };
  const strength = mode === "logprob" ? Math.min(1, -value / 5) : Math.min(1, Math.abs(Math.log(value)) / 0.5);
  const tone = mode === "logprob" ? "--swap" : value >= 1 ? "--publish" : "--generate";
  return { class: "", style: { backgroundColor: `color-mix(in oklch, var(${tone}) ${Math.round(strength * 65)}%, transparent)` } };
}

const visible = (piece) => (piece === "" ? "▯" : piece.replaceAll("\n", "↵\n").replaceAll("\t", "⇥"));

function Turn({ turn, mode, setTip }) {
  const tokens = useMemo(() => {
    const versions = spread(turn.versions), kv = spread(turn.kv_versions), trained = turn.trained ? spread(turn.trained) : [];
    const pieces = turn.pieces || [turn.completion];
    return pieces.map((piece, i) => {
      const logprob = turn.logprobs && turn.logprobs[i], trainer = turn.trainer_logprobs && turn.trainer_logprobs[i];
      return { i, piece, version: versions[i], kv: kv[i], trained: trained[i], logprob, trainer, ratio: isNumber(logprob) && isNumber(trainer) ? Math.exp(trainer - logprob) : undefined };
    });
  }, [turn]);
  const show = (event) => {
    const at = event.target.closest("[data-token]");
    if (!at) return setTip(null);
    const box = at.getBoundingClientRect();
    setTip({ x: event.clientX || box.left, y: event.clientY || box.bottom, token: tokens[+at.dataset.token] });
  };
  return html`
    <div class="tokens" onPointerMove=${show} onPointerDown=${show} onPointerLeave=${() => setTip(null)}>
      ${tokens.map((token, i) => {
        const swapped = i > 0 && token.version !== tokens[i - 1].version;
        const { class: name, style } = shade(mode, token);
        return html`${swapped && html`<span class="swap" title=${`version ${token.version} became live here`}>v${token.version}</span>`}<span data-token=${i} data-version=${token.version} class="token ${name} ${token.trained === 0 ? "untrained" : ""} ${/^<\|?.*\|?>$/.test(token.piece) ? "special" : ""}" style=${style}>${visible(token.piece)}</span>`;
      })}
    </div>
    <p class="note">${whole(turn.tokens)} tokens, ended by ${turn.finish_reason}${isNumber(turn.mean_logprob) ? `, mean log-prob ${number(turn.mean_logprob)}` : ""}</p>
    ${(turn.reply || []).map((message) => html`<div class="message"><b>${message.role}</b><pre>${message.content}</pre></div>`)}
  `;
}

function Legend({ mode, turns }) {
  if (mode === "version") {
    const counts = new Map();
    for (const turn of turns) for (const [v, n] of turn.versions) counts.set(v, (counts.get(v) || 0) + n);
    return html`<span class="chips">${[...counts].map(([v, n]) => html`<span class="chip ${versionClass(v)}" data-legend=${v}>v${v}<small> ${whole(n)}</small></span>`)}</span>`;
  }
  const words = { logprob: ["likely", "unlikely"], ratio: ["below 1", "above 1"], mask: ["trained", "left out"] }[mode];
  return html`<span class="note scale ${mode}"><i></i>${words[0]}<i></i>${words[1]}</span>`;
}

function Reader({ index, back }) {
  const [record, setRecord] = useState(null);
  const [failed, setFailed] = useState("");
  const [mode, setMode] = useState("version");
  const [tip, setTip] = useState(null);
  useEffect(() => {
    let stale = false;
    setTip(null);
    get(`api/episodes/${index}`).then((found) => stale || (setRecord(found), setFailed("")), (error) => stale || setFailed(error.message));
    return () => { stale = true; };
  }, [index]);
  if (failed) return html`<div class="reader"><p class="empty">${failed}</p></div>`;
  if (!record) return html`<div class="reader"><p class="empty">…</p></div>`;
  const parts = Object.entries(record.reward_parts || {});
  const rewards = record.group_rewards || [], low = Math.min(...rewards), high = Math.max(...rewards);
  const token = tip && tip.token;
  return html`
    <div class="reader" data-episode=${record.episode_id}>
      <div class="reader-head">
        <button class="back" onClick=${back}>← episodes</button>
        <h3>${record.episode_id}</h3>
        <div class="segments" role="radiogroup" aria-label="Shade tokens by">
          ${Object.entries(MODES).map(([key, name]) => html`<button role="radio" aria-checked=${mode === key} class=${mode === key ? "on" : ""} onClick=${() => setMode(key)}>${name}</button>`)}
        </div>
      </div>
      <div class="facts">
        <div><span>reward</span><b data-figure="episode-reward">${number(record.reward)}</b>${parts.map(([name, value]) => html`<small>${name} <b>${number(value)}</b></small>`)}</div>
        <div><span>group</span><b>${number(record.group_reward_mean)}</b><small>mean of ${rewards.length || "–"}${record.failed ? `, ${record.failed} failed` : ""}</small>
          ${rewards.length > 1 && html`<span class="strip" title=${rewards.map((r) => number(r)).join("  ")}>${rewards.map((r) => html`<i class=${r === record.reward ? "own" : ""} style=${{ left: `${high > low ? (100 * (r - low)) / (high - low) : 50}%` }}></i>`)}</span>`}</div>
        <div><span>prompt</span><b>${record.prompt_id}</b><small>${record.fate || `trained in step ${whole(record.step)}`}</small></div>
        ${record.answer !== null && record.answer !== undefined && html`<div><span>answer</span><b>${typeof record.answer === "string" ? record.answer : JSON.stringify(record.answer)}</b></div>`}
      </div>
      ${(record.prompt || []).map((message) => html`<div class="message"><b>${message.role}</b><pre>${message.content}</pre></div>`)}
      <div class="completion-head"><b>policy</b><${Legend} mode=${mode} turns=${record.turns} /></div>
      ${record.turns.map((turn) => html`<${Turn} turn=${turn} mode=${mode} setTip=${setTip} />`)}
      <${Tip} at=${tip}>${token && html`
        <b class="piece">${visible(token.piece)}</b>
        <table>
          <tr><td>token</td><td>${token.i + 1}</td></tr>
          <tr><td>version</td><td data-tip="version">${isNumber(token.version) ? token.version : "–"}</td></tr>
          ${isNumber(token.kv) && token.kv !== token.version && html`<tr><td>oldest keys</td><td>${token.kv}</td></tr>`}
          <tr><td>log-prob</td><td data-tip="logprob">${number(token.logprob, 4)}</td></tr>
          <tr><td>in the trainer</td><td>${number(token.trainer, 4)}</td></tr>
          <tr><td>ratio</td><td data-tip="ratio">${number(token.ratio, 4)}</td></tr>
          <tr><td>mask</td><td data-tip="mask">${token.trained === 1 ? "trained" : token.trained === 0 ? "left out" : "–"}</td></tr>
        </table>`}</${Tip}>
    </div>
  `;
}

export function Episodes({ count, missing }) {
  const [order, setOrder] = useState("newest");
  const [mixed, setMixed] = useState(false);
  const [step, setStep] = useState("");
  const [chosen, choose] = useState(null);
  const [open, setOpen] = useState(false);
  const query = `order=${order}&mixed=${mixed ? 1 : 0}${/^\d+$/.test(step) ? `&step=${step}` : ""}`;
  const panel = useRef(null);
  const list = useList(query, useInSight(panel, count));
  useEffect(() => { if (chosen === null && list.row(0)) choose(list.row(0)[0]); }, [list.tick]);
  const tools = html`
    <label><input type="checkbox" checked=${mixed} onChange=${(e) => setMixed(e.target.checked)} /> swapped midway</label>
    <input class="step" inputmode="numeric" placeholder="step" aria-label="Only of this step" value=${step} onInput=${(e) => setStep(e.target.value)} />
    <select aria-label="Order" onChange=${(e) => setOrder(e.target.value)}>
      ${["newest", "oldest", "best", "worst"].map((name) => html`<option value=${name} selected=${name === order}>${name}</option>`)}
    </select>`;
  return html`
    <${Panel} box=${panel} id="episodes" title="Episodes" note=${html`<span data-figure="episodes">${whole(list.total)}</span>${list.total !== list.all ? ` of ${whole(list.all)}` : ""}`} tools=${list.all ? tools : null}>
      ${list.all
        ? html`<div class="split ${open ? "open" : ""}">
            <div class="list-side"><div class="item names"><span class="step">step</span><span class="id">episode</span><span class="versions">versions</span><span class="count">tokens</span><span class="reward">reward</span></div>
              <${List} list=${list} chosen=${chosen} choose=${(i) => { choose(i); setOpen(true); }} />
              ${list.failed ? html`<p class="empty">${list.failed}</p>` : !list.total && html`<p class="empty">No episode is like that.</p>`}</div>
            ${chosen !== null && html`<${Reader} index=${chosen} back=${() => setOpen(false)} />`}
          </div>`
        : html`<p class="empty">${list.failed || (missing ? "There is no episodes.jsonl: no step was taken yet, or metrics.episodes_per_step is 0." : "No episode was recorded yet.")}</p>`}
    </${Panel}>
  `;
}
