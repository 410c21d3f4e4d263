/** The part of uPlot that the charts use, for the type checker. */
declare class uPlot {
  constructor(options: uPlot.Options, data: (number | null | undefined)[][], holder: HTMLElement);
  static tzDate(date: Date, zone: string): Date;
  static paths: { bars(options: object): unknown };
  readonly ctx: CanvasRenderingContext2D;
  readonly bbox: { left: number; top: number; width: number; height: number };
  readonly over: HTMLElement;
  readonly root: HTMLElement;
  readonly select: { left: number; width: number };
  readonly cursor: { idx: number | null | undefined };
  readonly width: number;
  readonly height: number;
  posToVal(position: number, scale: string): number;
  valToPos(value: number, scale: string, onCanvas?: boolean): number;
  redraw(paths?: boolean, axes?: boolean): void;
  setCursor(position: { left: number; top: number }, fireHook?: boolean, publish?: boolean): void;
  setData(data: (number | null)[][]): void;
  setSelect(box: { left: number; top: number; width: number; height: number }, fireHook?: boolean): void;
  destroy(): void;
  setSize(size: { width: number; height: number }): void;
}
declare namespace uPlot {
  interface Axis {
    splits?: (u: uPlot, axis: number, low: number, high: number, step: number) => number[];
    filter?: (u: uPlot, splits: number[]) => (number | null)[];
    values?: (u: uPlot, splits: number[], axis: number, space: number, step: number) => string[];
    [style: string]: unknown;
  }
  interface Scale {
    time?: boolean;
    distr?: number;
    range?: (u: uPlot, low: number | null, high: number | null) => [number, number];
  }
  interface Options {
    width: number;
    height: number;
    tzDate?: (seconds: number) => Date;
    scales: Record<string, Scale>;
    axes: Axis[];
    series: object[];
    legend?: object;
    cursor?: object;
    hooks?: Record<string, ((u: uPlot) => void)[]>;
  }
}
