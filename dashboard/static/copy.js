// @ts-check
/** The copy buttons in the head of a leaf's page. */
import { copiers, find } from "./dom.js";

const part = find("#copy");
part.hidden = false;
copiers(part, part.dataset.checkpoint ?? "", () => JSON.parse(part.dataset.path ?? '""'));
