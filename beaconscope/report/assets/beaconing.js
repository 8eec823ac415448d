// The beacons of a query head over time.

/** The changes of a head's beacons: each with the beacons that were in force from the next position on. */
export function beaconChanges(pack, head) {
  const name = `beacons.${head}`;
  if (!pack.has(`${name}.step`)) return [];
  const steps = pack.array(`${name}.step`);
  const counts = pack.array(`${name}.count`);
  const sources = pack.array(`${name}.source`);
  const members = pack.array(`${name}.members`);
  const changes = [];
  let entry = 0;
  let centroid = 0;
  for (let change = 0; change < steps.length; change++) {
    const beacons = [];
    for (let index = 0; index < counts[change]; index++, entry++) {
      const source = sources[entry] - 1;
      beacons.push({ index, source, members: members[entry], centroid: source < 0 ? centroid++ : -1 });
    }
    changes.push({ step: steps[change], beacons });
  }
  return changes;
}

/** Index of the change that is in force at a step: the last one before it; -1 before the first. */
export function changeAt(changes, step) {
  let low = 0;
  let high = changes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (changes[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/**
 * Life of each beacon: a beacon taken from a query lives while any change names that query, a centroid while its
 * number is there. `members` are the queries that were assigned to it in all.
 */
export function lifespans(changes, length) {
  const alive = new Map();
  const done = [];
  changes.forEach((change, number) => {
    const before = number ? changes[number - 1].beacons : [];
    // What a change counts are the members of the former beacon of that number.
    for (const { index, members } of change.beacons) {
      const former = before[index];
      if (former) alive.get(keyOf(former)).members += members;
    }
    const now = new Set(change.beacons.map(keyOf));
    for (const [key, life] of alive) {
      if (now.has(key)) continue;
      done.push({ ...life, death: change.step });
      alive.delete(key);
    }
    for (const beacon of change.beacons) {
      const key = keyOf(beacon);
      if (!alive.has(key)) {
        alive.set(key, { key, source: beacon.source, index: beacon.index, birth: change.step, death: null, members: 0 });
      }
    }
  });
  done.push(...[...alive.values()].map((life) => ({ ...life, death: null })));
  return done
    .map((life) => ({ ...life, end: life.death ?? length }))
    .sort((a, b) => a.birth - b.birth || (a.source < 0 ? a.index - b.index : a.source - b.source));
}

/** What a beacon is known by: the query it was taken from, or its number. */
export function keyOf(beacon) {
  return beacon.source >= 0 ? `q${beacon.source}` : `c${beacon.index}`;
}
