/** The part of d3-hierarchy that `treemap.js` uses, for the type checker. */
export interface Node<T> {
  data: T;
  depth: number;
  children?: Node<T>[];
  x0: number;
  y0: number;
  x1: number;
  y1: number;
  sum(value: (data: T) => number): Node<T>;
  eachBefore(visit: (node: Node<T>) => void): Node<T>;
}
export interface Treemap<T> {
  (root: Node<T>): Node<T>;
  size(size: [number, number]): Treemap<T>;
  paddingInner(padding: number): Treemap<T>;
  paddingTop(padding: (node: Node<T>) => number): Treemap<T>;
  round(round: boolean): Treemap<T>;
}
export function hierarchy<T>(data: T, children: (data: T) => T[] | null): Node<T>;
export function treemap<T>(): Treemap<T>;
