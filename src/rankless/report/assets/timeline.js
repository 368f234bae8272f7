// The timeline of saves: three charts with one axis, and all events as a table.

// The entries, and the times that the run went back as entries of their own, in the order of time.
function readEntries({ entries, placements, phases: names, abandoned, rollbacks }) {
  const left = new Set(abandoned);
  const saves = entries.map(([kind, time, tag, step, ranks, hosts, stall, seconds, bytes, shared, error, placement, phases], place) => ({
    kind, time, tag, step, ranks, hosts, stall, seconds, bytes, shared, error, placement: placements[placement], isAbandoned: left.has(place),
    phases: phases.map((spent, number) => [names[number], spent]).filter(([, spent]) => spent !== null), rate: seconds ? (bytes - shared) / seconds : 0 }));
  const back = rollbacks.map(([time, tag, host, incarnation, count]) => ({
    kind: 'rollback', time, tag: tag || 'a checkpoint that is removed', step: null, ranks: 0, hosts: 0, stall: 0, seconds: 0, bytes: 0, shared: 0, error: '',
    placement: [], isAbandoned: false, phases: [], rate: 0, job: `incarnation ${incarnation}${host ? ` on ${host}` : ''}`, count }));
  return [...saves, ...back].sort((one, other) => one.time - other.time);
}

// Which ranks ran on which hosts, such as "node-1: ranks 0–3, node-2: rank 4".
function describeHosts({ hosts, ranks, placement }) {
  let first = 0;
  const texts = placement.map(([name, count]) => {
    const text = `${name || 'a host'}: ${count > 1 ? `ranks ${first}–${first + count - 1}` : `rank ${first}`}`;
    first += count;
    return text;
  });
  if (!texts.length) return hosts ? formatCount(hosts, 'host') : '';
  return first < ranks ? `${formatCount(hosts, 'host')}, ${texts.join(', ')}, …` : texts.join(', ');
}

// How long each phase took, such as "prepare 8 ms, write 0.5 s".
const describePhases = (phases) => phases.map(([name, seconds]) => `${name} ${formatSeconds(seconds)}`).join(', ');

const describeEntry = (entry) => ({
  saved: () => `saved ${entry.tag}${entry.isAbandoned ? ', now abandoned' : ''}`, rollback: () => `went back to ${entry.tag}, abandoned ${formatCount(entry.count, 'checkpoint')} (${entry.job})`, failed: () => `failed to save ${entry.tag}`,
  resumed: () => `resumed from ${entry.tag}`, removed: () => `removed ${entry.tag}`,
})[entry.kind]();

function describeDetails(entry) {
  return [formatTime(entry.time), entry.step === null ? '' : `step ${formatStep(entry.step)}`, describeEntry(entry),
    entry.ranks ? formatCount(entry.ranks, 'rank') : '', entry.hosts ? formatCount(entry.hosts, 'host') : '',
    entry.kind === 'saved' && entry.seconds ? `stopped training for ${formatSeconds(entry.stall)}, durable after ${formatSeconds(entry.seconds)}, ${formatBytes(entry.rate)}/s` : '', describePhases(entry.phases),
    entry.error].filter(Boolean).join(' · ');
}

function makeTimeline(data) {
  const entries = readEntries(data.timeline);
  const events = entries.filter((entry) => entry.kind !== 'removed');
  const timed = events.filter((entry) => entry.kind === 'saved' && entry.seconds > 0);
  const readout = make('p', { class: 'readout muted' }, `${matchMedia('(hover: none)').matches ? 'Touch' : 'Point at'} a save to read it; the table of events has all of them.`);
  const charts = make('div', { role: 'img', 'aria-label': summarizeTimeline(entries, timed) });
  const omitted = data.timeline.omitted;
  const note = omitted ? `${entries.length} of ${(entries.length + omitted).toLocaleString('en')} events, sampled; --full shows all` : `${formatCount(timed.length, 'timed save')}, in their order`;
  const body = timed.length ? [charts, makeTimelineLegend(entries), ...makePhases(timed), readout]
    : [make('p', {}, 'How long saves took is not known: the run has no journal. It was saved by an older version, or only by conversions.')];
  const view = panel('saves', 'Saves', note, ...body);
  if (timed.length) {
    drawWhenSized(charts, (width) => drawTimeline(charts, events, width, (entry) => { readout.textContent = describeDetails(entry); }));
  }
  return view;
}

function summarizeTimeline(entries, timed) {
  const count = (kind) => entries.filter((entry) => entry.kind === kind).length;
  return `Charts of ${formatCount(timed.length, 'save')}: training stopped for ${formatSeconds(median(timed.map((entry) => entry.stall)))} (median), `
    + `durable after ${formatSeconds(median(timed.map((entry) => entry.seconds)))}. ${formatCount(count('failed'), 'failure')}, ${formatCount(count('resumed'), 'resume')}, `
    + `${formatCount(count('rollback'), 'rollback')}, ${formatCount(entries.filter((entry) => entry.isAbandoned).length, 'abandoned save')}. The table of events has the same data.`;
}

function makeTimelineLegend(entries) {
  const has = (kind) => entries.some((entry) => entry.kind === kind || (kind === 'abandoned' && entry.isAbandoned));
  const items = [['failed', 'save failed'], ['resumed', 'training resumed'], ['rollback', 'the run went back'], ['abandoned', 'abandoned: not in the line that goes on']]
    .filter(([kind]) => has(kind));
  return make('ul', { class: 'legend', 'aria-hidden': 'true' }, ...items.map(([kind, text]) => make('li', {}, make('span', { class: `swatch ${kind}` }), text)));
}

// The usual phases of a save, as parts of one bar. The texts below it are its legend.
function makePhases(timed) {
  const names = [...new Set(timed.flatMap(({ phases }) => phases.map(([name]) => name)))];
  const usual = names.map((name) => [name, median(timed.map(({ phases }) => phases.find(([other]) => other === name)?.[1] ?? 0))]);
  const total = usual.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return [];
  const parts = usual.map(([, seconds], number) => place(make('div', { class: `s${number + 1}` }), { 'flex-grow': seconds / total }));
  const texts = usual.map(([name, seconds], number) => make('li', {}, make('span', { class: `swatch s${number + 1}` }), `${name} ${formatSeconds(seconds)}`));
  return [make('div', { class: 'chart' }, make('h3', {}, 'Phases of a save', make('span', {}, 'medians, on rank 0')),
    make('div', { class: 'parts', 'aria-hidden': 'true' }, ...parts)), make('ul', { class: 'legend' }, ...texts)];
}

// The events have a panel of their own: next to a chart their columns would not fit.
function makeEvents(data) {
  const entries = readEntries(data.timeline);
  const columns = [['when', 'nowrap'], ['what', 'text'], ['step', 'right'], ['ranks', 'right'], ['hosts', 'text'], ['stopped for', 'right'], ['durable after', 'right'], ['rate', 'right'], ['phases', 'text'], ['why', 'text']];
  const details = make('details', {}, make('summary', {}, `${formatCount(entries.length, 'event')} as a table`));
  details.addEventListener('toggle', () => {
    if (details.childElementCount > 1) return;
    const rows = [...entries].reverse();
    details.append(makeTable('Events, newest first', columns, rows.map((entry) => [
      formatTime(entry.time), describeEntry(entry), formatStep(entry.step), entry.ranks ? String(entry.ranks) : '', describeHosts(entry),
      entry.kind === 'saved' && entry.seconds ? formatSeconds(entry.stall) : '', entry.seconds ? formatSeconds(entry.seconds) : '',
      entry.kind === 'saved' && entry.seconds ? `${formatBytes(entry.rate)}/s` : '', describePhases(entry.phases), entry.error]), (row) => (rows[row].kind === 'failed' ? 'failed' : rows[row].isAbandoned ? 'abandoned' : null)));
  });
  return panel('events', 'Events', 'saves, failures, resumes, rollbacks and removals, with the hosts of ranks', details);
}

// Draw now and whenever the width or the theme changes.
function drawWhenSized(element, draw) {
  let width = 0;
  const redraw = () => { if (width) { element.replaceChildren(); draw(width); } };
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.floor(contentRect.width) === width) return;
    width = Math.floor(contentRect.width);
    requestAnimationFrame(redraw);
  }).observe(element);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
}

function drawTimeline(root, events, width, onPoint) {
  const places = events.map((_, place) => place);
  // Abandoned saves are a series of their own, so that the line of the current ones leads past them.
  const values = (pick, isAbandoned) => events.map((entry) => (entry.kind === 'saved' && entry.seconds && entry.isAbandoned === isAbandoned ? pick(entry) : null));
  const series = [
    ['Training stopped for', 'seconds', (entry) => entry.stall, formatSeconds, uPlot.paths.bars({ size: [0.7, 14] })],
    ['Durable after', 'seconds', (entry) => entry.seconds, formatSeconds, null],
    ['Rate', 'of bytes that were written', (entry) => entry.rate, (rate) => `${formatBytes(rate)}/s`, null],
  ];
  series.forEach(([title, unit, pick, format, paths], number) => {
    const isLast = number === series.length - 1, host = make('div', {});
    root.append(make('div', { class: 'chart' }, make('h3', {}, title, make('span', {}, unit)), host));
    const makeSeries = (name, spanGaps, dash) => ({ stroke: color(name), fill: paths ? color(name) : null, width: paths ? 0 : 2, dash, paths,
      points: { show: events.length < 60 && !paths, size: 5, fill: color(name) }, spanGaps });
    const axis = { stroke: color('--muted'), grid: { stroke: color('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    new uPlot({
      width, height: [116, 96, 128][number], padding: [8, 12, isLast ? 0 : 6, 0], legend: { show: false },
      cursor: { sync: { key: 'saves' }, y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-0.5, Math.max(0.5, events.length - 0.5)] }, y: { range: (_, __, high) => [0, (high || 1) * (number ? 1.12 : 1.4)] } },
      series: [{}, makeSeries('--accent', true), makeSeries('--abandoned', false, [4, 4])],
      axes: [
        { ...axis, size: isLast ? 28 : 0, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], space: 70,
          values: (_, ticks) => ticks.map((place) => !isLast || (events[place]?.step ?? null) === null ? '' : `step ${formatStep(events[place].step)}`) },
        { ...axis, size: 66, space: 26, values: (_, ticks) => ticks.map((tick) => (tick ? format(tick) : '0')) },
      ],
      hooks: {
        draw: [(chart) => drawMarks(chart, events, number === 0)],
        setCursor: [(chart) => { const entry = events[chart.cursor.idx]; if (entry) onPoint(entry); }],
      },
    }, [places, values(pick, false), values(pick, true)], host);
  });
}

const shorten = (tag) => (tag.length > 24 ? `${tag.slice(0, 23)}…` : tag);

// A text beside a line, on the colour of the panel: else lines of the grid would strike it through. Returns where it ends.
function drawLabel(ctx, text, x, top, isLeft) {
  const ratio = devicePixelRatio, width = ctx.measureText(text).width;
  const start = isLeft ? x - 4 * ratio - width : x + 4 * ratio;
  ctx.textAlign = 'left';
  ctx.fillStyle = color('--panel');
  ctx.fillRect(start - ratio, top, width + 2 * ratio, 14 * ratio);
  ctx.fillStyle = color('--text');
  ctx.fillText(text, start, top + 11 * ratio);
  return start + width;
}

// Mark failures, resumes and rollbacks: dots, dashed and solid lines.
function drawMarks(chart, events, isFirst) {
  const { ctx, bbox } = chart, ratio = devicePixelRatio;
  const findX = (place) => Math.round(chart.valToPos(place, 'x', true));
  ctx.save();
  events.forEach(({ kind }, place) => {
    const x = findX(place);
    if (kind === 'resumed' || kind === 'rollback') {
      ctx.strokeStyle = color(kind === 'resumed' ? '--note' : '--bad');
      ctx.setLineDash(kind === 'resumed' ? [4 * ratio, 3 * ratio] : []);
      ctx.lineWidth = 1.5 * ratio;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    if (kind === 'failed') {
      ctx.fillStyle = color('--bad');
      ctx.beginPath(); ctx.arc(x, bbox.top + bbox.height - 5 * ratio, 4 * ratio, 0, 7); ctx.fill();
    }
  });
  if (isFirst) drawTexts(ctx, bbox, events, findX);
  ctx.restore();
}

// Write the number of ranks where it changes, and to which checkpoint the run went back, in a line below. They are drawn after all marks.
// On a phone a number of ranks may overlap the one before: then it is in the third line.
function drawTexts(ctx, bbox, events, findX) {
  const ratio = devicePixelRatio;
  let ranks = 0, end = 0;
  ctx.font = `${11 * ratio}px system-ui`;
  events.forEach((entry, place) => {
    if (entry.kind === 'rollback') {
      drawLabel(ctx, `back to ${shorten(entry.tag)}`, findX(place), bbox.top + 15 * ratio, place > events.length * 0.7);
    }
    if (entry.ranks && entry.ranks !== ranks && entry.kind !== 'failed') {
      ranks = entry.ranks;
      const x = findX(place), isFree = x + 2 * ratio > end;
      end = drawLabel(ctx, formatCount(ranks, 'rank'), x, bbox.top + (isFree ? 0 : 29 * ratio), place > events.length * 0.85);
    }
  });
}
