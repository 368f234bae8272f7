// The data of the page, and the inverse of what compaction.py does to its columns.

const DIGITS = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_';
const LEVELS = new Map([...DIGITS].map((digit, level) => [digit, level]));

function decodeNames({ shared, endings, ending }) {
  const names = [];
  let parts = [];
  for (let row = 0; row < shared.length; row += 1) {
    parts = [...parts.slice(0, shared[row]), ...endings[ending[row]].split('.')];
    names.push(parts.join('.'));
  }
  return names;
}

// Return the tensors as objects: simple to sort and to filter, and 20,000 of them are few.
function decodeTensors(data) {
  const columns = data.tensors, statistics = data.statistics;
  const nans = new Map(statistics?.nans), infs = new Map(statistics?.infs);
  const differences = new Map((data.differences ?? []).map(([row, ...numbers]) => [row, numbers]));
  const models = columns.groups.filter((group) => group.startsWith('model/')).map((group) => `${group.slice('model/'.length)}/`);
  return decodeNames(columns.names).map((name, row) => {
    const group = columns.groups[columns.group[row]];
    const [dtype, shape, bytes, elements] = columns.signatures[columns.signature[row]];
    const listed = group.startsWith('optimizer') && name.includes('/') ? name.slice(0, name.lastIndexOf('/')) : name;
    const model = models.find((prefix) => listed.startsWith(prefix));  // of several models, each is a module of the tree
    const parameter = model ? `${model.slice(0, -1)}.${listed.slice(model.length)}` : listed;
    const tensor = {
      row, name, group, dtype, shape, bytes, elements, parameter,
      path: `${group.startsWith('model/') ? 'model' : group}/${name}`, kind: columns.kinds[columns.kind[row]],
      sharing: data.sharing?.[row] ?? '?', trained: columns.trained[row] ?? '?', state: data.states?.[row] ?? '=',
    };
    if (statistics) {
      Object.assign(tensor, {
        norm: statistics.norm[row], min: statistics.min[row], max: statistics.max[row],
        nans: nans.get(row) ?? 0, infs: infs.get(row) ?? 0, histogram: statistics.histograms[row],
        ...decodeNorms(statistics.norms[row], statistics.scale),
      });
      tensor.measured = tensor.norm !== null || tensor.histogram !== '' || tensor.nans + tensor.infs > 0;
    }
    if (data.states) {
      const [share, absolute, relative] = differences.get(row) ?? [0, 0, 0];
      Object.assign(tensor, { share, absolute: absolute ?? Infinity, relative: relative ?? Infinity });
    }
    return tensor;
  });
}

// Return the norm in each checkpoint, where it is not finite, and by what factor it moved from the first to the last.
function decodeNorms(code, [low, high]) {
  if (!code) return { norms: [], moved: null };
  const at = (first) => Math.min(Number.MAX_VALUE, Math.exp(low + (high - low) * (LEVELS.get(code[first]) * 64 + LEVELS.get(code[first + 1])) / 4095));
  const least = at(0), most = at(2);
  const norms = [...code.slice(4)].map((digit) => (LEVELS.has(digit) ? least + (most - least) * LEVELS.get(digit) / 63 : digit === '!' ? NaN : null));
  const known = norms.filter((norm) => norm !== null && !Number.isNaN(norm));
  return { norms, moved: known.length > 1 && known[0] > 0 ? known.at(-1) / known[0] : null };
}

// Return the levels of the bars, and the power of two at which the last one ends.
function decodeHistogram(code) {
  if (!code) return null;
  const place = LEVELS.get(code[0]) * 64 + LEVELS.get(code[1]);
  return { bars: [...code.slice(2)].map((digit) => LEVELS.get(digit) ?? 0), top: place - 64 + 1 };
}

// Modules by their path: each has the tensors below it.
function buildTree(tensors) {
  const root = { name: '', path: '', bytes: 0, children: new Map(), tensors: [] };
  for (const tensor of tensors) {
    let node = root, path = '';
    node.bytes += tensor.bytes;
    node.tensors.push(tensor);
    for (const part of tensor.parameter.split('.')) {
      path = path ? `${path}.${part}` : part;
      if (!node.children.has(part)) node.children.set(part, { name: part, path, bytes: 0, children: new Map(), tensors: [] });
      node = node.children.get(part);
      node.bytes += tensor.bytes;
      node.tensors.push(tensor);
    }
  }
  return root;
}

function findModule(root, path) {
  let node = root;
  for (const part of path ? path.split('.') : []) {
    node = node?.children.get(part);
  }
  return node;
}

// Counters of steps, and generators of random numbers: their differences say nothing about the model.
const isCounter = (tensor) => tensor.kind === 'values' || tensor.elements <= 1;

const findLargestDifference = (tensors) => tensors.reduce((most, tensor) => (isCounter(tensor) ? most : Math.max(most, tensor.absolute)), 0);
