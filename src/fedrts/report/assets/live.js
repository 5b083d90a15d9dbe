
// -- following a run ----------------------------------------------------------------------------------------------

const EVERY = 2000;
const status = document.getElementById("live");
let stamp = status.dataset.stamp;

/** What the reader has opened and hidden, to be so again after the page was renewed. */
const looks = () => ({
  open: [...document.querySelectorAll("details[open]")].map((details) => details.closest("[id]").id + details.className),
  hidden: [...document.querySelectorAll("figure .legend button[aria-pressed=false]")].map((b) => b.closest("figure").id + b.textContent),
  at: window.scrollY,
});

const again = ({ open, hidden, at }) => {
  for (const details of document.querySelectorAll("details")) details.open = open.includes(details.closest("[id]").id + details.className);
  for (const b of document.querySelectorAll("figure .legend button")) if (hidden.includes(b.closest("figure").id + b.textContent)) b.click();
  window.scrollTo({ top: at, behavior: "instant" });
};

const renew = async () => {
  const answer = await fetch(location.pathname + location.search, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const before = looks();
  for (const part of ["main", "nav"]) document.querySelector(part).replaceChildren(...document.importNode(page.querySelector(part), true).childNodes);
  document.getElementById("figures").textContent = page.getElementById("figures").textContent;
  document.title = page.title;
  fill();
  again(before);
  return page.getElementById("live").dataset.stamp;
};

const look = async () => {
  try {
    const answer = await fetch(`stamp${location.search}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    if ((await answer.text()) !== stamp) stamp = await renew();
    status.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
    status.classList.remove("lost");
  } catch {
    status.textContent = "fedrts watch does not answer: is it still running?";
    status.classList.add("lost");
  }
  setTimeout(look, EVERY);
};

setTimeout(look, EVERY);
