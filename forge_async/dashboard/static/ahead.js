// What a page asks for at first, asked while the rest of its code is still on its way.
export const FIRST = { state: "api/state", episodes: "api/episodes?start=0&count=50&order=newest&mixed=0", timeline: "api/timeline?pixels=1000" };
const asked = new Map(Object.values(FIRST).map((path) => [path, fetch(path)]));
for (const answer of asked.values()) answer.catch(() => {}); // told to whoever awaits it

export function answerTo(path) {
  const answer = asked.get(path);
  asked.delete(path);
  return answer || fetch(path);
}
