// The first lines: is the run healthy, what do saves cost, how large is it.

function makeHealth(data) {
  const bad = data.findings.some(([level]) => level === 'bad');
  const headline = bad ? 'Needs attention' : data.kind === 'run' ? 'No problem found' : 'Nothing wrong was found';
  const looked = { run: 'the names and manifests of all checkpoints, and the journal of saves', weights: 'the manifests of all versions' };
  const checks = looked[data.kind] ?? 'the metadata of the checkpoint';
  const unread = Object.keys(data.verified).length ? [] : [' Tensor bytes were not verified (', make('code', {}, '--verify'), ').'];
  const unknown = data.statistics ? [] : [' Values were not looked at (', make('code', {}, '--stats'), ').'];
  return make('section', { class: `panel health ${bad ? 'bad' : ''}`, 'aria-label': 'Health' },
    make('span', { class: 'mark', 'aria-hidden': 'true' }, bad ? '▲' : '✓'),
    make('div', {}, make('strong', {}, headline),
      make('ul', {}, ...data.findings.map(([level, text]) => make('li', { class: level }, text)),
        ...data.notes.map((text) => make('li', {}, text))),
      make('p', { class: 'muted' }, `Looked at: ${checks}.`, ...unread, ...unknown)));
}

const makeCard = (title, value, note) => make('dl', { class: 'card' }, make('dt', {}, title), make('dd', { class: 'number' }, value), make('dd', {}, note));

function makeCards(data, tensors) {
  const cards = [makeCard(data.kind === 'run' ? 'Latest in this report' : 'Saved', data.step === null ? data.focus : `step ${formatStep(data.step)}`,
    [data.saved ? formatTime(data.saved) : data.format, data.world_size ? formatCount(data.world_size, 'rank') : ''].filter(Boolean).join(' · '))];
  if (data.timeline) {
    const timed = readEntries(data.timeline).filter((entry) => entry.kind === 'saved' && entry.seconds > 0);
    const stalls = timed.map((entry) => entry.stall), seconds = timed.map((entry) => entry.seconds);
    cards.push(timed.length
      ? makeCard('A save stops training for', formatSeconds(median(stalls)), `median of ${formatCount(timed.length, 'save')} · at most ${formatSeconds(Math.max(...stalls))}`)
      : makeCard('A save stops training for', '–', 'no journal of saves'));
    if (timed.length) {
      cards.push(makeCard('Durable after', formatSeconds(median(seconds)), `median · ${formatBytes(median(timed.map((entry) => entry.rate)))}/s`));
    }
  }
  const shared = tensors.filter((tensor) => tensor.sharing === 's').reduce((sum, tensor) => sum + tensor.bytes, 0);
  cards.push(makeCard('Size of a checkpoint', formatBytes(data.nbytes), `${formatCount(tensors.length, 'tensor')}${shared ? ` · ${formatBytes(shared)} shared` : ''}`));
  if (data.checkpoints) {
    const own = data.checkpoints.reduce((sum, row) => sum + row[7], 0);
    const total = data.checkpoints.length + data.checkpoints_omitted;
    const note = data.kind === 'weights' ? `${formatBytes(own)} written for them` : `${formatBytes(own)} of the disk by themselves`;
    const [title, noun] = data.kind === 'weights' ? ['Published', 'version'] : ['In the run', 'checkpoint'];
    cards.push(makeCard(title, formatCount(total, noun), data.checkpoints_omitted ? `${data.checkpoints.length} of them are shown` : note));
  }
  return make('div', { class: 'cards' }, ...cards);
}

function makeSides(data, tensors) {
  const [left, right] = data.sides;
  const describe = (side) => [side.step === null ? '' : `step ${formatStep(side.step)}`, side.saved ? formatTime(side.saved) : '',
    side.world_size ? formatCount(side.world_size, 'rank') : '', formatBytes(side.nbytes)].filter(Boolean).join(' · ');
  const differing = data.states.replaceAll('=', '').length;
  const largest = findLargestDifference(tensors);
  return make('div', { class: 'cards' },
    makeCard('A', left.tag, describe(left)), makeCard('B', right.tag, describe(right)),
    makeCard('Tensors that differ', differing.toLocaleString('en'), `of ${data.states.length.toLocaleString('en')}`),
    makeCard('Largest difference', formatNumber(largest === Infinity ? null : largest), largest === Infinity ? 'not finite' : 'of an element of weights or moments'),
    makeCard('Values that differ', String(data.values.length), 'settings, counters, states'));
}

function makeCheckpoints(data) {
  const rows = [...data.checkpoints].reverse();
  const isWeights = data.kind === 'weights', title = isWeights ? 'Versions' : 'Checkpoints';
  const columns = [[isWeights ? 'version' : 'tag', 'text'], ['step', 'right'], [isWeights ? 'published' : 'saved', 'nowrap'], ['ranks', 'right'], ['run', 'nowrap'], ['size', 'right'], [isWeights ? 'written' : 'own disk', 'right'], ['status', 'text'], ['metrics', 'text']];
  const cells = rows.map(([tag, status, step, time, ranks, run, bytes, own, aliases, metrics, problem, isCurrent]) => [
    aliases.length ? `${tag} (${aliases.join(', ')})` : tag, formatStep(step), formatTime(time), ranks ? String(ranks) : '–', run.slice(0, 6),
    formatBytes(bytes), formatBytes(own), describeStatus(data, tag, isCurrent ? status : 'abandoned', problem),
    Object.entries(metrics).map(([name, value]) => `${name} ${formatNumber(value)}`).join(', ')]);
  const hasAbandoned = rows.some((row) => !row[11]);
  const order = `newest first${hasAbandoned ? ', then those from which the run went back' : ''}`;
  const note = data.checkpoints_omitted ? `${rows.length} of ${(rows.length + data.checkpoints_omitted).toLocaleString('en')}, sampled evenly; --full shows all` : isWeights ? order : `${order}; own disk is what no other checkpoint shares`;
  return panel('checkpoints', title, note, makeTable(title, columns, cells, (row) => (rows[row][1] !== 'complete' ? 'failed' : rows[row][11] ? null : 'abandoned')));
}

function describeStatus(data, tag, status, problem) {
  const verified = Object.hasOwn(data.verified, tag) ? data.verified[tag] : null;
  if (problem) return `${status}: ${problem}`;
  return verified ? `${status}, ${verified.status}` : status;
}
