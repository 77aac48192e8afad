"use strict";
const $ = (id) => document.getElementById(id);
const NONE = 65535, GUTTER = 92, AXIS = 26, STRIP = 20, LANE = 16, GAP = 10, BAND = 27, LOADS = 46;
const EXPERTS = ["#332288", "#DDCC77", "#44AA99", "#882255", "#88CCEE", "#999933", "#AA4499", "#117733"];
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const us = (ns, digits = 1) => (ns / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " us";
// What all charts share: one clock, one rank, one way to colour.
let charts = [], rank = 0, byExpert = false, from = 0, to = 0, total = 0;

async function unpack(text, meta) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const rows = meta.ranks * (meta.lanes.length + meta.sms * (meta.has_loads ? 2 : 1));
  const first = new Uint32Array(buffer, 0, rows + 1), num = first[first.length - 1];
  let at = first.byteLength;
  const take = (type) => { const a = new type(buffer, at, num); at += a.byteLength; return a; };
  const gap = take(Uint32Array), time = take(Uint32Array);
  const [wave, expert, m, n] = [0, 1, 2, 3].map(() => take(Uint16Array));
  const kind = take(Uint8Array), start = new Float64Array(num);
  for (let row = 0; row + 1 < first.length; row++)
    for (let i = first[row], last = 0; i < first[row + 1]; i++) { start[i] = last + gap[i]; last = start[i] + time[i]; }
  return { first, start, time, wave, expert, m, n, kind };
}

class Chart {                       // one timeline on its canvas
  constructor(stage, meta, data) {
    this.canvas = stage.querySelector("canvas"); this.pen = this.canvas.getContext("2d"); this.tip = stage.querySelector(".tip");
    this.meta = meta; this.data = data; this.width = 0; this.waves = [];
    this.rows = meta.lanes.length + meta.sms * (meta.has_loads ? 2 : 1);
    this.isMath = meta.kinds.map((k) => k.key === "l1" || k.key === "l2");
    const isLane = meta.kinds.map((k) => meta.lane_kinds.includes(k.key));
    this.lanes = data.kind.some((k) => isLane[k]) ? meta.lanes : [];
    this.listen();
  }

  get rank() { return Math.min(rank, this.meta.ranks - 1); }
  get smHeight() { return Math.max(2, Math.min(8, (charts.length > 1 ? 264 : 330) / this.meta.sms)); }
  get top0() { return AXIS + STRIP + this.lanes.length * LANE + 4; }
  get bottom0() { return this.top0 + this.meta.sms * this.smHeight; }
  get under() { return this.bottom0 + (this.meta.has_loads ? GAP + LOADS : 0); }  // where other ranks begin
  get others() { return [...Array(this.meta.ranks).keys()].filter((r) => r !== this.rank); }
  get height() { return this.under + (this.meta.ranks > 1 ? GAP + this.others.length * BAND : 0) + 4; }
  smTop(sm) { return Math.round(this.top0 + sm * this.smHeight); }
  smRow(which, sm = 0) { return which * this.rows + this.meta.lanes.length + sm; }
  x(ns) { return GUTTER + ((ns - from) / (to - from)) * (this.width - GUTTER); }
  ns(px) { return from + ((px - GUTTER) / (this.width - GUTTER)) * (to - from); }
  colour(i) { const d = this.data; return byExpert && this.isMath[d.kind[i]] ? EXPERTS[d.expert[i] % EXPERTS.length] : this.meta.kinds[d.kind[i]].colour; }

  findWaves() {
    const found = [], d = this.data;
    for (let i = d.first[this.smRow(this.rank)]; i < d.first[this.smRow(this.rank, this.meta.sms)]; i++) {
      if (!this.isMath[d.kind[i]]) continue;
      const w = (found[d.wave[i]] ??= { start: Infinity, end: 0, low: NONE, high: 0, blocks: 0 });
      w.start = Math.min(w.start, d.start[i]); w.end = Math.max(w.end, d.start[i] + d.time[i]);
      w.low = Math.min(w.low, d.expert[i]); w.high = Math.max(w.high, d.expert[i]); w.blocks++;
    }
    this.waves = found;
  }

  lower(row, ns) {                  // first span of the row that ends after ns
    const d = this.data;
    let a = d.first[row], b = d.first[row + 1];
    while (a < b) { const c = (a + b) >> 1; d.start[c] + d.time[c] <= ns ? (a = c + 1) : (b = c); }
    return a;
  }

  drawRow(row, y, h, edge = 0) {
    const d = this.data, pen = this.pen;
    for (let i = this.lower(row, from), end = d.first[row + 1]; i < end && d.start[i] < to; i++) {
      const a = Math.max(this.x(d.start[i]), GUTTER), b = Math.min(this.x(d.start[i] + d.time[i]), this.width);
      pen.fillStyle = this.colour(i);
      pen.globalAlpha = byExpert && this.meta.kinds[d.kind[i]].key === "l2" ? 0.55 : 1;
      pen.fillRect(a, y, Math.max(b - a - (b - a > 3 ? edge : 0), 0.4), h - edge);
    }
    pen.globalAlpha = 1;
  }

  sharesOf(row, columns, low = from, high = to) {  // [kind][column]: share of the SMs whose rows begin there
    const d = this.data, out = this.meta.kinds.map(() => new Float32Array(columns)), scale = columns / (high - low);
    for (let r = row; r < row + this.meta.sms; r++)
      for (let i = this.lower(r, low), end = d.first[r + 1]; i < end && d.start[i] < high; i++) {
        const a = Math.max((d.start[i] - low) * scale, 0), b = Math.min((d.start[i] + d.time[i] - low) * scale, columns);
        for (let c = Math.floor(a); c < b; c++) out[d.kind[i]][c] += (Math.min(b, c + 1) - Math.max(a, c)) / this.meta.sms;
      }
    return out;
  }

  drawShares(row, y, h) {           // stacked, `h` high where all SMs are at it
    const columns = Math.max(1, Math.floor((this.width - GUTTER) / 2)), shares = this.sharesOf(row, columns), pen = this.pen;
    for (let c = 0; c < columns; c++) {
      let up = y + h;
      for (let k = 0; k < shares.length; k++) {
        const part = shares[k][c] * h;
        if (part < 0.05) continue;
        pen.fillStyle = this.meta.kinds[k].colour; pen.fillRect(GUTTER + c * 2, up - part, 2, part); up -= part;
      }
    }
  }

  drawBand(which, y) {
    const h = BAND - 12;
    this.drawShares(this.smRow(which), y + 6, h);
    this.drawRow(which * this.rows, y, 3.6); this.drawRow(which * this.rows + 1, y + 6 + h + 1, 3.6);
  }

  drawLoads() {
    const y = this.bottom0 + GAP, pen = this.pen;
    pen.fillStyle = "#f6f8fa"; pen.fillRect(GUTTER, y, this.width - GUTTER, LOADS);
    this.drawShares(this.smRow(this.rank, this.meta.sms), y, LOADS);
    pen.strokeStyle = "#1c243040"; pen.lineWidth = 1; pen.setLineDash([2, 3]); pen.beginPath();
    for (const share of [0, 0.5]) { const at = Math.round(y + share * LOADS) + 0.5; pen.moveTo(GUTTER, at); pen.lineTo(this.width, at); }
    pen.stroke(); pen.setLineDash([]);
    this.label("all SMs", y + 4); this.label("weights in", y + LOADS / 2, true); this.label("none", y + LOADS - 5);
  }

  label(text, y, bold) {
    const pen = this.pen;
    pen.font = (bold ? "600 " : "") + FONT; pen.fillStyle = bold ? "#1c2430" : "#5b6676";
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText(text, GUTTER - 9, y);
  }

  drawAxis() {
    const span = (to - from) / 1000, rough = span / 8, ten = 10 ** Math.floor(Math.log10(rough)), pen = this.pen;
    const step = [1, 2, 5, 10].map((s) => s * ten).find((s) => s >= rough);
    pen.font = FONT; pen.textBaseline = "middle"; pen.textAlign = "center";
    for (let t = Math.ceil(from / 1000 / step) * step; t <= to / 1000; t += step) {
      const at = this.x(t * 1000);
      pen.fillStyle = "#e6eaf0"; pen.fillRect(at, AXIS - 4, 1, this.height - AXIS);
      pen.fillStyle = "#5b6676";
      const text = t.toLocaleString("en", { maximumFractionDigits: 3 }), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(at, GUTTER + half), this.width - half), 9);
    }
    this.label("time in us", 9);
  }

  drawWaves() {
    const pen = this.pen;
    this.label("waves", AXIS + STRIP / 2 - 2);
    pen.font = FONT; pen.textAlign = "center"; pen.textBaseline = "middle";
    this.waves.forEach((w, i) => {
      const next = this.waves.slice(i + 1).find(Boolean), end = next ? next.start : w.end;
      const a = Math.max(this.x(w.start), GUTTER), b = Math.min(this.x(end), this.width);
      if (b <= a) return;
      pen.fillStyle = i % 2 ? "#cfd6e0" : "#e6eaf0"; pen.fillRect(a, AXIS, b - a, STRIP - 5);
      const text = b - a > 70 ? `wave ${i}` : `${i}`;
      pen.fillStyle = "#1c2430";
      if (b - a > pen.measureText(text).width + 3) pen.fillText(text, (a + b) / 2, AXIS + STRIP / 2 - 2);
      pen.strokeStyle = "#1c243059"; pen.lineWidth = 1; pen.setLineDash([2, 3]); pen.beginPath();
      if (this.x(w.start) >= GUTTER) { pen.moveTo(a, AXIS + STRIP - 5); pen.lineTo(a, this.bottom0); }
      pen.stroke(); pen.setLineDash([]);
    });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, pen = this.pen, canvas = this.canvas, { sms, ranks } = this.meta;
    this.width = canvas.parentElement.clientWidth;
    const height = this.height;
    canvas.width = this.width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    this.drawAxis();
    this.lanes.forEach((name, lane) => {
      const y = AXIS + STRIP + lane * LANE;
      pen.fillStyle = "#f6f8fa"; pen.fillRect(GUTTER, y, this.width - GUTTER, LANE - 3);
      this.drawRow(this.rank * this.rows + lane, y, LANE - 3); this.label(name, y + LANE / 2 - 1);
    });
    pen.fillStyle = "#f6f8fa"; pen.fillRect(GUTTER, this.top0, this.width - GUTTER, sms * this.smHeight);
    for (let sm = 0; sm < sms; sm++) this.drawRow(this.smRow(this.rank, sm), this.smTop(sm), this.smTop(sm + 1) - this.smTop(sm), 0.6);
    this.drawWaves();
    const middle = (this.top0 + this.bottom0) / 2, name = ranks > 1 || charts.length === 1 ? `rank ${this.rank}` : this.meta.source;
    this.label("SM 0", this.top0 + 6); this.label(name, middle - 8, true); this.label(`${sms} SMs`, middle + 8); this.label(`SM ${sms - 1}`, this.bottom0 - 6);
    if (this.meta.has_loads) this.drawLoads();
    this.others.forEach((which, i) => {
      const y = this.under + GAP + i * BAND;
      this.drawBand(which, y); this.label(`rank ${which}`, y + BAND / 2 - 1);
    });
  }

  blockText(i, place) {
    const d = this.data, k = this.meta.kinds[d.kind[i]], rows = [`<b>${k.name}</b>`, `<em>${k.about}</em>`, place];
    if (d.expert[i] !== NONE) rows.push(`expert ${d.expert[i]}` + (d.m[i] !== NONE ? `, row block m ${d.m[i]}` : "") + (d.n[i] !== NONE ? `, weight block n ${d.n[i]}` : ""));
    if (d.wave[i] !== NONE) rows.push(`wave ${d.wave[i]}`);
    rows.push(`starts at ${us(d.start[i], 2)}, takes ${us(d.time[i], 2)}`);
    return rows.join("<br>");
  }

  shareText(row, ns, head, foot) {  // what the SMs do near a moment
    const near = (to - from) / 400, shares = this.sharesOf(row, 1, ns - near, ns + near);
    const rows = this.meta.kinds.map((k, i) => [k.name, shares[i][0]]).filter((r) => r[1] > 0.005).sort((p, q) => q[1] - p[1]);
    return `<b>${head}</b> near ${us(ns)}<br>` + rows.map((r) => `${Math.round(r[1] * 100)}% ${r[0]}`).join("<br>") + `<br><em>${foot}</em>`;
  }

  textAt(px, py) {
    if (px < GUTTER || px > this.width) return "";
    const ns = this.ns(px), d = this.data, place = `rank ${this.rank}`;
    const inRow = (row, where) => { const i = this.lower(row, ns); return i < d.first[row + 1] && d.start[i] <= ns ? this.blockText(i, where) : ""; };
    if (py >= AXIS && py < AXIS + STRIP - 4) {
      const i = this.waves.findLastIndex((w) => w && w.start <= ns), w = this.waves[i];
      return w ? `<b>wave ${i}</b><br>experts ${w.low} to ${w.high}, ${w.blocks} blocks<br>first block at ${us(w.start)}, last ends at ${us(w.end)}` : "";
    }
    const lane = Math.floor((py - AXIS - STRIP) / LANE);
    if (py < this.top0) return lane >= 0 && lane < this.lanes.length ? inRow(this.rank * this.rows + lane, `${place}, links`) : "";
    if (py < this.bottom0) { const sm = Math.floor((py - this.top0) / this.smHeight); return inRow(this.smRow(this.rank, sm), `${place}, SM ${sm}`); }
    if (py < this.under) return this.shareText(this.smRow(this.rank, this.meta.sms), ns, "weights in", "share of SMs that issue copies");
    const which = this.others[Math.floor((py - this.under - GAP) / BAND)];
    return which === undefined ? "" : this.shareText(this.smRow(which), ns, `rank ${which}`, "click to open this rank");
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const text = this.textAt(px, py), tip = this.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.innerHTML = text;
    tip.style.left = Math.max(0, px + 16 + tip.offsetWidth > this.width ? px - tip.offsetWidth - 14 : px + 16) + "px";
    tip.style.top = Math.max(0, Math.min(py + 14, this.height - tip.offsetHeight - 4)) + "px";
  }

  listen() {
    const canvas = this.canvas;
    let held = null;
    canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      zoom(e.deltaY > 0 ? 1.25 : 0.8, this.ns(Math.max(e.clientX - canvas.getBoundingClientRect().left, GUTTER)));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (e) => { held = { x: e.clientX, from, moved: false }; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", (e) => {
      if (!held) return this.hover(e);
      if (Math.abs(e.clientX - held.x) < 3 && !held.moved) return;
      held.moved = true; this.tip.hidden = true;
      move(held.from + ((held.x - e.clientX) / (this.width - GUTTER)) * (to - from));
    });
    canvas.addEventListener("pointerup", (e) => {
      const y = e.clientY - canvas.getBoundingClientRect().top;
      const which = this.others[Math.floor((y - this.under - GAP) / BAND)];
      if (held && !held.moved && y > this.under + GAP && which !== undefined) choose(which);
      held = null;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => zoom(1e9));
  }
}

const draw = () => charts.forEach((c) => c.draw());

function move(start, span = to - from) {
  from = Math.min(Math.max(start, 0), total - span); to = from + span; draw();
}

function zoom(factor, at = (from + to) / 2) {
  const span = Math.min(Math.max((to - from) * factor, 500), total);
  move(at - ((at - from) / (to - from)) * span, span);
}

function choose(which) {
  rank = which; charts.forEach((c) => c.findWaves());
  [...$("ranks").querySelectorAll("button")].forEach((b, i) => b.classList.toggle("on", i === rank)); draw();
}

function paint(expert) {
  byExpert = expert; $("by-expert").classList.toggle("on", expert); $("by-role").classList.toggle("on", !expert); legend(); draw();
}

function legend() {
  const { meta, isMath } = charts[0], used = new Set(charts.flatMap((c) => [...new Set(c.data.kind)]));
  const chip = (c, text, about) => `<span title="${about}"><i style="background:${c}"></i>${text}</span>`;
  const kinds = meta.kinds.filter((k, i) => used.has(i) && !(byExpert && isMath[i]));
  const experts = byExpert ? EXPERTS.map((c, i) => chip(c, i === 0 ? "expert 0, 8, 16, …" : `${i}, …`, "eight colours in turn; L2 is paler")) : [];
  $("legend").innerHTML = [...experts, ...kinds.map((k) => chip(k.colour, k.name, k.about))].join("");
}

function listen() {
  window.addEventListener("resize", draw);
  window.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[e.key];
    if (by) move(from + by * (to - from));
    if (e.key === "+") zoom(0.6);
    if (e.key === "-") zoom(1.6);
  });
  $("in").onclick = () => zoom(0.5); $("out").onclick = () => zoom(2); $("reset").onclick = () => zoom(1e9);
  $("by-role").onclick = () => paint(false); $("by-expert").onclick = () => paint(true);
}

async function begin() {
  for (const [i, stage] of [...document.querySelectorAll(".stage")].entries()) {
    const suffix = i ? `-${i}` : "", meta = JSON.parse($("meta" + suffix).textContent);
    charts.push(new Chart(stage, meta, await unpack($("spans" + suffix).textContent, meta)));
  }
  total = to = Math.max(...charts.map((c) => c.meta.total_ns));
  const { ranks, left_out } = charts[0].meta;
  document.querySelectorAll(ranks > 1 ? ".single" : ".several").forEach((e) => { e.hidden = true; });
  if (ranks > 1) $("ranks").innerHTML = "rank " + [...Array(ranks).keys()].map((r) => `<button>${r}</button>`).join("");
  [...$("ranks").querySelectorAll("button")].forEach((b, i) => { b.onclick = () => choose(i); });
  if (left_out) { $("left-out").hidden = false; $("left-out").textContent = `${left_out} more ranks were simulated and left out of this page to keep it small; trace.json has them all.`; }
  legend(); choose(0); listen();
}

begin().catch((error) => { $("legend").textContent = "This page needs a browser from 2023 or later (DecompressionStream): " + error; });
