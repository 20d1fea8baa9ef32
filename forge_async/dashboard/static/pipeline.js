// Who does what: prompts, generators, rewards, buffer, trainer and store in the order in which data passes them.
import { html } from "./vendor/htm-preact.js";
import { bytes, duration, isNumber, number, Panel, percent, Rows, versionClass, whole } from "./util.js";

// The newer of what was seen and what was told: a version never goes back while its process lives.
const newest = (...versions) => { const known = versions.filter(isNumber); return known.length ? Math.max(...known) : undefined; };

const Version = ({ of, figure }) => isNumber(of) ? html`<span class="chip ${versionClass(of)}" data-figure=${figure}>v${of}</span>` : html`<span>–</span>`;

const Idle = ({ share, figure }) => html`
  <div class="idle" title="Share of the time without work">
    <div class="track"><div class="done" style=${{ width: `${isNumber(share) ? Math.round((1 - share) * 100) : 0}%` }}></div></div>
    <span><b data-figure=${figure}>${percent(share)}</b> idle</span>
  </div>
`;

const Stage = ({ name, tone, doing, cause, children }) => html`
  <article class="stage" data-stage=${name.toLowerCase()}>
    <h3><i class="dot ${tone}"></i>${name}${doing && html`<span class="doing" title=${cause} data-figure=${`${name.toLowerCase()}-doing`}>${doing}</span>`}</h3>
    ${children}
  </article>
`;

function Prompts({ status, summary }) {
  const ledger = (summary && summary.ledger) || (status && status.ledger) || {};
  const dropped = Object.entries(ledger.dropped || {});
  const open = summary ? 0 : ledger.in_flight;
  return html`<${Stage} name="Prompts" tone="reward">
    <${Rows} of=${[
      ["admitted", whole(ledger.admitted), "admitted"],
      ["trained", whole(ledger.trained), "trained"],
      isNumber(open) && open > 0 && ["open", whole(open)],
      dropped.length > 0 && ["dropped", whole(dropped.reduce((sum, [, count]) => sum + count, 0))],
      ...dropped.map(([reason, count]) => [`· ${reason.replaceAll("_", " ")}`, whole(count), `dropped-${reason}`]),
    ]} />
  </${Stage}>`;
}

function Generators({ run }) {
  const replicas = (run.status && run.status.policy) || [];
  const last = run.metrics.last;
  const count = replicas.length || run.config.replicas || 0;
  const ids = Array.from({ length: Math.min(1000, count) }, (_, i) => i);
  return html`<${Stage} name="Generators" tone="generate" doing=${`${number(last["tokens_per_s/generated"], 0)} tok/s`}>
    ${ids.map((i) => {
      const replica = replicas[i] || {}, swaps = run.events.swaps[i];
      const there = !["dead", "starting", "stopped"].includes(replica.state), idle = last[`idle/generator_${i}`];
      const version = there ? newest(replica.version, swaps && swaps.version) : undefined;
      return html`<div class="replica" data-replica=${i}>
        <div class="line"><b>replica ${i}</b><${Version} of=${version} figure=${`replica-${i}-version`} />
          <span class="word" title=${replica.cause} data-figure=${`replica-${i}-doing`}>${replica.state === "healthy" || !replica.state ? replica.doing || "" : replica.state}</span></div>
        <${Idle} share=${isNumber(idle) ? idle : replica.idle} figure=${`replica-${i}-idle`} />
        <${Rows} of=${[
          isNumber(replica.tokens_per_s) && ["tokens/s", number(replica.tokens_per_s, 0), `replica-${i}-rate`],
          isNumber(replica.running) && ["running", whole(replica.running), `replica-${i}-running`],
          isNumber(replica.waiting) && ["queued", whole(replica.waiting), `replica-${i}-queued`],
          isNumber(replica.generated_tokens) && ["tokens", whole(replica.generated_tokens), `replica-${i}-tokens`],
          ["swaps", swaps ? html`${whole(swaps.count)} · ${duration(swaps.pause_ms / 1000)}` : "–", `replica-${i}-swaps`],
          replica.respawns > 0 && ["respawns", whole(replica.respawns)],
        ]} />
      </div>`;
    })}
    ${!count && html`<p class="note">No replica has reported yet.</p>`}
  </${Stage}>`;
}

function Rewards({ run }) {
  const rewards = run.status && run.status.rewards, last = run.metrics.last;
  const parts = Object.keys(last).filter((key) => key.startsWith("reward_parts/"));
  const failed = Object.entries((rewards && rewards.failed) || {});
  return html`<${Stage} name="Rewards" tone="reward" doing=${rewards && rewards.busy ? "scoring" : ""}>
    <${Rows} of=${[
      ["mean", html`<b>${number(last.reward)}</b>`, "reward"],
      ...(parts.length > 1 ? parts.map((key) => [key.slice(13), number(last[key])]) : []),
      rewards && ["workers", `${rewards.busy} of ${rewards.workers} busy`, "workers"],
      rewards && rewards.replaced > 0 && ["replaced", whole(rewards.replaced)],
      ...failed.map(([reason, n]) => [`failed: ${reason}`, whole(n)]),
      ["equal groups", percent(last["buffer/uniform"]), "uniform"],
    ]} />
  </${Stage}>`;
}

function Buffer({ run }) {
  const buffer = (run.status && run.status.buffer) || {}, last = run.metrics.last;
  const ages = Object.entries(buffer.ages || {}).map(([age, [done, running]]) => [+age, done, running]);
  const most = Math.max(1, ...ages.map(([, done, running]) => done + running));
  const oldest = Math.max(buffer.max_staleness || 0, ...ages.map(([age]) => age));
  const rows = Array.from({ length: oldest + 1 }, (_, age) => ages.find(([a]) => a === age) || [age, 0, 0]);
  return html`<${Stage} name="Buffer" tone="pull" doing=${buffer.capacity ? `${buffer.open} of ${buffer.capacity}` : ""}>
    ${buffer.ages && html`<div class="ages" role="img" aria-label="Open prompts by age in versions">
      ${rows.map(([age, done, running]) => html`<div class="age" title=${`${done} finished, ${running} in flight`}>
        <span>${age}</span><div class="bars"><i class="ready" style=${{ width: `${(100 * done) / most}%` }}></i><i class="flight" style=${{ width: `${(100 * running) / most}%` }}></i></div>
        <span class="sum" data-figure=${`age-${age}`}>${done + running}</span></div>`)}
    </div>
    <p class="note key"><span><i class="ready"></i>finished</span> <span><i class="flight"></i>in flight</span> <span>by age</span></p>`}
    <${Rows} of=${[
      ["ready", whole(isNumber(buffer.ready) ? buffer.ready : last["buffer/ready"]), "buffer-ready"],
      ["in flight", whole(isNumber(buffer.in_flight) ? buffer.in_flight : last["buffer/in_flight"]), "buffer-in-flight"],
      ["staleness", html`${number(last.staleness_mean, 2)} · max ${whole(last.staleness_max)}`, "staleness"],
    ]} />
  </${Stage}>`;
}

function Trainer({ run }) {
  const ranks = (run.status && run.status.trainer) || [], last = run.metrics.last, first = ranks[0] || {};
  const published = run.events.published, word = first.state && first.state !== "healthy" ? first.state : first.doing || "";
  const share = last["idle/trainer"];
  return html`<${Stage} name="Trainer" tone="train" cause=${first.cause} doing=${ranks.length > 1 ? `${ranks.length} ranks · ${word}` : word}>
    <div class="line"><b>version</b><${Version} of=${newest(first.version, published && published.version)} figure="trainer-version" /></div>
    <${Idle} share=${isNumber(share) ? share : first.idle} figure="trainer-idle" />
    <${Rows} of=${[
      ["trained", html`${number(last["tokens_per_s/trained"], 0)} tok/s`, "trained-rate"],
      ["loss", number(last["train/loss"], 4), "loss"],
      ["grad norm", number(last["train/grad_norm"], 3), "grad-norm"],
      ["learning rate", number(last["train/learning_rate"], 7), "learning-rate"],
      ["ratio", html`${number(last["train/ratio_mean"])} · max ${number(last["train/ratio_max"], 2)}`, "ratio"],
    ]} />
  </${Stage}>`;
}

function Store({ run }) {
  const store = (run.status && run.status.store) || {}, published = run.events.published;
  const readers = store.readers || {};
  return html`<${Stage} name="Store" tone="publish" cause=${store.cause} doing=${store.state || (store.pending && store.pending.length ? `writing v${store.pending[0]}` : "")}>
    <div class="chips" data-figure="versions">
      ${(store.versions || []).slice(-6).map((v) => html`<span class="chip ${versionClass(v)}" data-version=${v} data-leases=${readers[v] || 0} title=${`${readers[v] || 0} leases`}>v${v}${readers[v] ? html`<sup>${readers[v]}</sup>` : ""}</span>`)}
      ${!store.versions && published && html`<${Version} of=${published.version} />`}
    </div>
    <${Rows} of=${[
      isNumber(store.leases) && ["leases", whole(store.leases), "leases"],
      published && ["a version", bytes(published.bytes), "version-bytes"],
      published && ["written in", duration(published.wall_s)],
      isNumber(store.segment_bytes) && ["memory", bytes(store.segment_bytes)],
      published && ["digest", html`<code>${String(published.digest).slice(0, 8)}</code>`, "digest"],
    ]} />
  </${Stage}>`;
}

// Of a run that is over or silent, what somebody was doing when it was last seen is no news.
const atRest = (status) => status && {
  ...status,
  policy: (status.policy || []).map(({ doing, running, waiting, tokens_per_s, ...rest }) => rest),
  trainer: (status.trainer || []).map(({ doing, ...rest }) => rest),
  buffer: { max_staleness: (status.buffer || {}).max_staleness },
  store: { ...status.store, pending: [] },
};

export function Pipeline({ run: seen, live }) {
  const run = live ? seen : { ...seen, status: atRest(seen.status) };
  const mode = run.config.update_mode, published = run.events.published;
  return html`
    <${Panel} id="pipeline" title="Pipeline" note=${run.status ? "" : "no status.json: live figures are missing"}>
      <div class="stages">
        <${Prompts} status=${run.status} summary=${run.summary} />
        <${Generators} run=${run} />
        <${Rewards} run=${run} />
        <${Buffer} run=${run} />
        <${Trainer} run=${run} />
        <${Store} run=${run} />
      </div>
      <div class="feedback"><span>weights${published ? ` v${published.version}` : ""} go back to the generators${mode ? html` · <code>${mode}</code>` : ""}</span></div>
    </${Panel}>
  `;
}
