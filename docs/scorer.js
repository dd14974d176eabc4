// How a search sorts: pages and sections whose titles have the words come before names of the API.
Scorer = {
  score: (result) => {
    const [, title, , description, score] = result;
    const query = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase();
    return title.toLowerCase().includes(query) && !description ? score + 100 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
