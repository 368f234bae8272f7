// Small pictures of one tensor: how its norm moved, and its histogram.

function makeSpark(norms, width = 110, height = 22) {
  const known = norms.filter((norm) => Number.isFinite(norm));
  if (norms.length < 2) return document.createTextNode('–');
  const unit = Math.max(...known) || 1, low = Math.min(...known) / unit, high = Math.max(...known) / unit; // the sum of two may be infinite
  const x = (place) => 3 + place * (width - 6) / (norms.length - 1);
  const span = Math.max(high - low, 0.1 * high) || 1, bottom = (high + low - span) / 2; // noise must not look like a trend
  const y = (norm) => height - 4 - (norm / unit - bottom) / span * (height - 8);
  const points = norms.map((norm, place) => (Number.isFinite(norm) ? `${x(place).toFixed(1)},${y(norm).toFixed(1)}` : null)).filter(Boolean);
  const bad = norms.map((norm, place) => (Number.isNaN(norm) ? make('circle', { cx: x(place), cy: height / 2, r: 3, class: 'bad' }) : null));
  const last = Number.isFinite(norms.at(-1)) ? make('circle', { cx: x(norms.length - 1), cy: y(norms.at(-1)), r: 2.2 }) : null;
  return make('svg', { class: 'spark', viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': describeNorms(norms, known) },
    make('polyline', { points: points.join(' ') }), ...bad, last);
}

function describeNorms(norms, known) {
  const bad = norms.filter((norm) => Number.isNaN(norm)).length;
  return `norm from ${formatNumber(known[0])} to ${formatNumber(known.at(-1))}${bad ? `, not finite in ${formatCount(bad, 'checkpoint')}` : ''}`;
}

function makeBars(code, width = 76, height = 22) {
  const histogram = decodeHistogram(code);
  if (!histogram) return document.createTextNode('–');
  const step = width / histogram.bars.length, middle = (histogram.bars.length - 1) / 2;
  return make('svg', { class: 'bars', viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': describeBars(histogram) },
    make('path', { d: histogram.bars.map((level, bar) => (bar === middle ? '' : drawBar(bar * step, level, step, height))).join('') }),
    make('path', { class: 'zero', d: drawBar(middle * step, histogram.bars[middle], step, height) }));
}

// One path for all bars: a rectangle each would make scrolling slow.
function drawBar(x, level, step, height) {
  const tall = (height - 1) * level / 63, wide = Math.max(1, step - 1);
  return level ? `M${x.toFixed(1)} ${height}v-${tall.toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}z` : '';
}

function describeBars({ bars, top }) {
  const middle = (bars.length - 1) / 2;
  const highest = bars.indexOf(Math.max(...bars)) - middle;
  const where = highest ? `${highest < 0 ? 'negative' : 'positive'} numbers around 2^${top - 2 * (middle - Math.abs(highest)) - 1}` : 'zeros';
  return `histogram by powers of two up to 2^${top}; most elements are ${where}`;
}

const defineTerms = (terms) => make('dl', {}, ...terms.filter(Boolean).flatMap(([term, text]) => [make('dt', {}, term), make('dd', { class: 'number' }, text)]));

// All that is known about one tensor.
function makeDetail(data, tensor) {
  const statistics = data.statistics;
  const facts = defineTerms([
    ['group', tensor.group], ['kind', tensor.kind], ['dtype', tensor.dtype], ['shape', `[${tensor.shape.join(', ')}]`],
    ['elements', tensor.elements.toLocaleString('en')], ['size', formatBytes(tensor.bytes)],
    data.before ? ['since ' + data.before, SHARING[tensor.sharing]] : null,
    data.tensors.trained && tensor.trained !== '?' ? ['training', TRAINED[tensor.trained]] : null,
    data.states ? ['A and B', STATES[tensor.state]] : null,
    tensor.share ? ['elements that differ', formatShare(tensor.share, 1)] : null,
    tensor.share ? ['largest difference', `${formatNumber(tensor.absolute)} (relative ${formatNumber(tensor.relative)})`] : null,
  ]);
  const parts = [facts];
  if (statistics && tensor.measured) {
    parts.push(defineTerms([
      ['values of', statistics.tags.at(-1)], ['norm', formatNumber(tensor.norm)], ['smallest', formatNumber(tensor.min)], ['largest', formatNumber(tensor.max)],
      ['NaN', tensor.nans.toLocaleString('en')], ['infinite', tensor.infs.toLocaleString('en')],
      tensor.moved === null ? null : [`norm since ${statistics.tags[0]}`, `× ${formatNumber(tensor.moved)}`]]));
    const histogram = decodeHistogram(tensor.histogram);
    if (histogram) {
      parts.push(make('div', {}, make('h3', {}, 'Elements by power of two'), makeBars(tensor.histogram, 300, 90),
        make('p', { class: 'muted' }, `from −${formatPower(histogram.top)} over 0 (grey) to ${formatPower(histogram.top)}; a bar is a factor of 4`)));
    }
    if (tensor.norms.length > 1) {
      parts.push(make('div', {}, make('h3', {}, 'Norm in the checkpoints'), makeSpark(tensor.norms, 300, 90),
        make('p', { class: 'muted' }, `${statistics.tags[0]} to ${statistics.tags.at(-1)}; red: NaN or infinity`)));
    }
  }
  return make('div', {}, make('h3', {}, tensor.path), make('div', { class: 'detail-parts' }, ...parts));
}
