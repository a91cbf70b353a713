// Ranks the results of a search, says which section each of them leads to, and shows the text there. Sphinx's own excerpts
// need a web server, and are missing for entries of the index. TEXTS has the ids, the title and the text of each section.
document.addEventListener("DOMContentLoaded", () => {
  const query = (new URLSearchParams(location.search).get("q") || "").toLowerCase();
  const terms = query.split(/[^\p{L}\p{N}_]+/u).filter((term) => term && !stopwords.has(term));
  const stems = terms.map((term) => term.replace(/(?<=...)(?:es|s|ed|ing)$/, ""));
  const count = (text, words = stems) => words.filter((word) => text.toLowerCase().includes(word)).length;
  // The title of the page is about all of its sections, so its words do not say which section is the best one.
  function best(sections) {
    const words = stems.filter((stem) => !count(sections[0][1], [stem]));
    const value = ([, title, text]) => 3 * count(title, words) + count(text, words);
    return sections.reduce((one, other) => (value(other) > value(one) ? other : one));
  }
  // Pages for those who change elasticrs or compare it come last.
  const last = /^(?:docs\/(?:api|design|architecture|benchmarks|comparison|compatibility|development)|[A-Z]+$)/;
  function textScore(page) {
    const [, title, text] = best(TEXTS[page]);
    const titles = `${TEXTS[page][0][1]} ${title}`;
    // An option comes before other sections that have all words only in their text.
    const isOption = page === "docs/options" && count(`${title} ${text}`) === stems.length;
    return 3 * count(titles) + count(text) + (isOption ? 2 : 0);
  }
  Scorer.score = ([page, , , , score, , kind]) => (kind === "text" ? textScore(page) : score) - (last.test(page) ? 12 : 0);

  const shown = new Set();
  function describe(result) {
    const link = result.querySelector("a");
    const [page, anchor] = link.getAttribute("href").split(".html");
    const sections = TEXTS[page];
    const section = anchor ? sections.find(([ids]) => ids.includes(anchor.slice(1))) : best(sections);
    if (!section) return; // The result is a name in the API reference, which has a description.
    const [[id], title, text] = section;
    if (shown.has(page + id)) return result.remove();
    shown.add(page + id);
    if (!anchor && section !== sections[0]) link.href += `#${id}`;
    link.textContent = section === sections[0] ? title : `${sections[0][1]} › ${title}`;
    const places = stems.map((stem) => text.toLowerCase().indexOf(stem)).filter((place) => place > 120);
    const start = count(text.slice(0, 240)) || !places.length ? 0 : Math.min(...places) - 80;
    const excerpt = document.createElement("p");
    excerpt.className = "context";
    excerpt.textContent = (start ? "… " : "") + text.slice(start, start + 240) + (start + 240 < text.length ? " …" : "");
    result.append(excerpt);
    for (const stem of stems) _highlightText(excerpt, stem, "highlighted");
  }

  const seen = ({ addedNodes }) => addedNodes.forEach((node) => node.tagName === "LI" && describe(node));
  const results = document.getElementById("search-results");
  new MutationObserver((changes) => changes.forEach(seen)).observe(results, { childList: true, subtree: true });
});
