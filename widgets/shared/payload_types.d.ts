// What the kernel sends, as views/payload.py and the payloads beside it pack it. tests/views/test_payload_types.py holds the
// samples' payloads to these types, and reads them itself: interfaces and types of JSON, nothing else.

/** Index of a mesh axis in `Mesh.axes`. */
export type AxisIndex = number;

/** Position of a device in the mesh, row-major. */
export type Position = number;

/** A piece of a sentence. Spans of the kinds "memory" and "line" lead there. */
export type Span = [text: string, kind: "text" | "strong" | "axis" | "code" | "memory" | "line"];

/** Devices along an axis, from `first` on, before `end`. */
export type Within = [axis: AxisIndex, first: number, end: number];

export type Role = "params" | "frozen" | "optimizer" | "batch" | "rng" | "other";

/** The sign before a word: its shape and colour. */
export type Sign = "ok" | "error" | "warning" | "info";

export type TabId = "layout" | "memory" | "communication" | "measured" | "pipeline" | "training";

/** A report. */
export interface Report {
  v: 1;
  title: Title;
  mesh: Mesh;
  verdict: Verdict;
  notes: string[];
  foot: string[];
  check: Check | null;
  time: PredictedTime | null;
  figures: Figure[];
  options: Options | null;
  advice: Advice[];
  /** Pieces of advice that are open at first. */
  hints: number;
  tabs: Tab[];
  opens_on: TabId | null;
  leaves: Leaves;
  whys: string[];
  withins: Within[][];
  /** Leaves with missing sharding, by index. */
  short: Record<string, Short>;
  failed: number[];
  noise: number[];
  rows: Row[];
  memory: Memory | null;
  figures_of: RowFigures;
  communication: Communication | null;
  measured: Measured | null;
  pipeline: Pipeline | null;
  training: Training | null;
}

export interface Title {
  strategy: string;
  options: string;
  name: string | null;
}

export interface Mesh {
  axes: [name: string, size: number][];
  devices: number[];
  /** Host of each device; empty where all are on one. */
  hosts: number[];
  text: string;
}

export interface Verdict {
  ok: boolean | null;
  spans: Span[];
}

export interface Check {
  passed: boolean;
  lines: [line: string, leaves: [path: string, told: string][]][];
  noise: [line: string, leaves: [path: string, told: string][]][];
}

/** The predicted step: the device's own parts first, `own` of them, then each kind of collective by axes. */
export interface PredictedTime {
  total: number;
  text: string;
  range: string | null;
  parts: [kind: string, axes: AxisIndex[] | null, seconds: number, text: string][];
  own: number;
}

export interface Figure {
  label: string;
  value: string;
  note: string;
  sign: Sign | null;
  opens: TabId | null;
  mark: Mark | null;
}

export type Mark = RangeMark | ShareMark | AxesMark | LimitMark;

export interface RangeMark {
  kind: "range";
  min: number;
  median: number;
  max: number;
  predicted: number | null;
}

export interface ShareMark {
  kind: "share";
  share: number;
}

export interface AxesMark {
  kind: "axes";
  parts: [axis: AxisIndex | null, share: number][];
}

export interface LimitMark {
  kind: "limit";
  value: number;
  limit: number;
  ok: boolean;
}

export interface Options {
  title: string;
  heads: [head: string, title: string][];
  rows: [change: string, values: string[], shares: string[]][];
  why: string[];
}

export interface Advice {
  level: "info" | "warning" | "error";
  head: string;
  rest: string;
  fix: string | null;
}

export interface Tab {
  id: TabId;
  label: string;
  number: string;
}

/** Leaves as columns; `why` and `within` are indices into `whys` and `withins`. */
export interface Leaves {
  path: string[];
  role: Role[];
  dtype: string[];
  shape: number[][];
  /** The axes of each dimension, major first. */
  spec: AxisIndex[][][];
  bytes: number[];
  /** Bytes on a device. */
  held: number[];
  why: number[];
  within: number[];
}

export interface Short {
  wanted: AxisIndex[];
  lost: number;
  total: number;
  followers: number;
  fix: string | null;
}

/** A row of the layout's table: a leaf, or a family of layers. */
export type Row = [role: Role, path: string, leaves: number[]];

/** Drawings of experts and positions: rectangles in thousandths. */
export type RowFigure = [lead: string, axis: AxisIndex, height: number, rows: FigureRow[]];
export type FigureRow = [name: string, areas: Area[], text: string];
export type Area = [x: number, y: number, width: number, height: number, opacity: number];

export interface RowFigures {
  layout: RowFigure[];
  communication: RowFigure[];
}

export interface Memory {
  limit: number | null;
  limit_text: string | null;
  source: "measured" | "computed";
  lead: Span[];
  scale_note: string | null;
  roles: MemoryRole[];
  devices: DeviceMemory;
  stages: string[] | null;
  groups: DeviceGroup[];
  live: LiveMemory | null;
  buffers: MemoryBuffer[] | null;
  /** Count and bytes of the buffers that are not listed. */
  others: [count: number, bytes: number] | null;
  buffers_lead: string | null;
}

export type MemoryRole = "params" | "optimizer" | "batch" | "temporaries" | "other";

/** Bytes by position. */
export interface DeviceMemory {
  device: number[];
  params: (number | null)[];
  optimizer: (number | null)[];
  batch: (number | null)[];
  temporaries: (number | null)[];
  other: (number | null)[];
  peak: (number | null)[];
  measured: (number | null)[];
}

/** Devices that hold alike; `top` is the fullest. */
export interface DeviceGroup {
  text: string;
  stage: string;
  members: Position[];
  top: Position;
}

/** A line of the user's code. */
export interface LineFacts {
  source: number | null;
  line: number | null;
  place: string | null;
  short: string | null;
  calls: string;
  text: string | null;
}

/** Live bytes from the instruction `at` on. */
export interface LiveMemory extends LineFacts {
  at: number[];
  bytes: number[];
  instructions: number;
  peak: number;
  phases: [name: string, from: number][];
  lead: string;
  told: string;
}

export interface MemoryBuffer extends LineFacts {
  bytes: number;
  count: number;
  type: string;
  what: string;
  about: string;
  told: string;
}

export interface Communication {
  lead: Span[];
  total: number;
  /** Head of the column of bytes that leave an island of devices. */
  between: string | null;
  ways: [axis: AxisIndex, way: string][];
  step_s: number | null;
  rows: Collective[];
  sources: Source[];
  measured: [source: number | null, line: number, took: string][];
}

export interface Collective {
  kind: string;
  axes: AxisIndex[] | null;
  group_size: number | null;
  count: number;
  exact: boolean;
  bytes: number;
  wire_bytes: number;
  network_bytes: number | null;
  seconds: number | null;
  links: number | null;
  share: number;
  phase: "forward" | "backward" | "update" | null;
  what: string | null;
  job: string | null;
  source: number | null;
  line: number | null;
  short: string | null;
  text: string | null;
  called: string | null;
}

export interface Source {
  name: string;
  /** Whether the step is defined here. */
  home: boolean;
  note: string | null;
  lines: [number: number, text: string][];
}

export interface Measured {
  lead: Span[];
  about: string;
  notes: string[];
  kinds: [letter: string, kind: string][];
  lanes: LinesInTime;
  heads: string[];
  rows: string[][];
  tables: [heads: string[], rows: string[][]][];
}

/** What the lanes draw: a pipeline's actions, or the lines of a recorded step. */
export interface Lanes {
  source: string;
  unit: "s" | "";
  /** Duration of a tick. */
  tick: number;
  end: number;
  ideal_end: number | null;
  kept: number[];
  losses: number;
  ranks: Rank[];
  events: LaneEvents[];
  ideal: LaneTimes[] | null;
}

/** Lanes of a recorded step, in which the line takes the place of the microbatch. */
export interface LinesInTime extends Lanes {
  lines: [location: string, text: string][];
}

export interface Rank {
  name: string;
  stages: string | null;
  of: string | null;
  devices: string | null;
  bubble: string | null;
  ideal: string | null;
  held: string | null;
  bytes: string | null;
  peak: number | null;
  size: number | null;
}

/** Ticks since the end of the previous event, and of the event, for each. */
export interface LaneTimes {
  wait: number[];
  take: number[];
}

/** Columns of a rank's actions; `sizes` has the number of actions of each event, null for one each. */
export interface LaneEvents extends LaneTimes {
  kinds: string;
  stage: number | number[];
  mb: number[];
  sizes: number[] | null;
}

export interface Pipeline extends Lanes {
  lead: Span[];
  about: string;
  parts: [what: string, share: number, text: string, more: string | null][];
  bubble: number;
  work: string;
  kinds: string[];
  now: PipelineNow;
  what_if: WhatIf[];
  refused: [schedule: string, stages: number, microbatches: number, chunks: number, why: string][];
}

/** A report of a schedule alone. */
export interface PipelineAlone {
  v: 1;
  pipeline: Pipeline;
}

export interface PipelineNow {
  schedule: string;
  stages: number;
  microbatches: number;
  chunks: number;
  ideal: number;
  bubble: number;
  makespan: number;
  peak: number | null;
  bytes: number | null;
}

export type WhatIf = [
  schedule: string,
  stages: number,
  microbatches: number,
  chunks: number,
  ideal: number,
  bubble: number,
  makespan: number,
  peak: number,
];

export interface Training {
  lead: Span[];
  charts: Chart[];
  heads: string[];
  rows: string[][];
  notes: string[];
}

/** Curves of one number, of several runs over each other. */
export interface Chart {
  label: string;
  unit: string | null;
  value: string;
  curves: Curve[];
}

export interface Curve {
  buckets: Bucket[];
  /** First step whose value is not finite. */
  astray: number | null;
}

export type Bucket = [step: number, least: number | null, mean: number | null, most: number | null];

/** What is new of a run in progress. */
export interface TrainingUpdate {
  v: 1;
  number: number;
  line: string;
  share: number | null;
  curves: CurveTail[];
}

/** Buckets of a curve from `start` on. */
export interface CurveTail extends Curve {
  name: string;
  label: string;
  unit: string | null;
  value: string;
  start: number;
  width: number;
}

/** A comparison; a choice has `choice`, too. */
export interface Comparison {
  v: 1;
  lead: Span[];
  about: string;
  notes: string[];
  axes: string[];
  source: string;
  limit: number | null;
  limit_text: string | null;
  sent: SentColumns;
  trials: Trial[];
  left: string[];
  pairs: TrialDetails;
  curves: RunCurves | null;
  choice?: Choice;
}

/** Columns of bytes sent; without axes where those are not known, or several columns are one. */
export interface SentColumns {
  unit: string;
  names: string[];
  axes: (AxisIndex[] | null)[];
}

export type Answer = [sign: Sign | null, word: string, more: string];

export interface Trial {
  name: string;
  more: string;
  label: string;
  line: string;
  failed: boolean;
  why: string[] | null;
  fix: string | null;
  fits: Answer;
  over: boolean;
  peak: number | null;
  peak_text: string;
  seconds: number | null;
  seconds_text: string;
  apart: boolean;
  tail: number | null;
  sent: (number | null)[];
  sent_text: string[];
  bubble: number | null;
  bubble_text: string;
  same: Answer;
  differs: number | null;
  /** Whether it is a point of the picture. */
  point: boolean;
  facts: [term: string, told: string][];
  mesh: [axis: AxisIndex, size: number][];
  front: boolean;
}

/** For a comparison of two: an entry for each trial, null without a report. */
export interface TrialDetails {
  leaves: LayoutColumns;
  memory: (RoleMemory | null)[];
  moved: (Moved[] | null)[];
}

/** `layout` is an index into `layouts`. */
export interface LayoutColumns {
  path: string[];
  count: number[];
  follow: number[];
  layout: ((number | null)[] | null)[];
  held: ((number | null)[] | null)[];
  layouts: [text: string, axis: AxisIndex | null][][];
}

export interface RoleMemory {
  params: number | null;
  optimizer: number | null;
  batch: number | null;
  temporaries: number | null;
  other: number | null;
  peak: number | null;
}

export type Moved = [
  kind: string,
  axes: AxisIndex[] | null,
  bytes: number,
  seconds: number | null,
  count: number,
  exact: boolean,
];

export interface RunCurves {
  names: string[];
  charts: Chart[];
}

export interface Choice {
  runs: [name: string, line: string][];
  path: Question[];
  path_title: string;
  agreement: string;
  others: [fate: string, alike: [group: Candidate[], why: string][], left: number][];
  others_title: string;
  others_open: boolean;
}

export type Emphasis = "strong" | "unsure" | "quiet";

export interface Question {
  asks: string;
  because: string;
  way: Emphasis;
  branches: [answer: string, leaf: string | null, emphasis: Emphasis][];
}

export interface Candidate {
  name: string;
  more: string;
  mesh: [axis: AxisIndex, size: number][];
  bound: string;
  needs: string;
  arrays: string;
}

/** Names of the axes of each dimension. */
export type Cut = string[][];

/** An explorer: what its edits don't change. */
export interface Explorer {
  v: 1;
  step: boolean;
  leaves: ExploredLeaves;
  rows: Row[];
  now: number[] | null;
  strategies: string[];
  line: ExploredLine;
  cell: string | null;
}

/** `classes` numbers dimensions: those of a number are cut alike. */
export interface ExploredLeaves {
  path: string[];
  role: Role[];
  dtype: string[];
  shape: number[][];
  bits: number[];
  bytes: number[];
  classes: number[][];
}

export interface ExploredLine {
  home: string | null;
  kept: string[];
  rules: string[];
}

/** An explorer's edits, and what Python makes of them: the names of the model's traits. */
export interface ExplorerState {
  axes: [name: string, size: number][];
  strategy: string;
  wishes: Record<string, Cut>;
  laid: Laid;
  compiled: Compiled | null;
}

/** The strategy's layout of the mesh that was asked for. */
export interface Laid {
  strategy: string;
  mesh: [name: string, size: number][];
  devices: number[];
  cuts: Cut[];
  why: number[];
  whys: string[];
  settled: Settled | null;
  given: number[];
  note: string;
  count: number | null;
  made_of: string;
}

/** The layout with what was set by hand. */
export interface Settled {
  wishes: Record<string, Cut>;
  cuts: Cut[];
}

/** A line as the compiler read it, or why it was refused. */
export interface Compiled {
  line: string;
  error: string | null;
  axes: string[];
  verdict: Span[];
  rows: [name: string, over: string[] | null, predicted: string, compiled: string][];
  answer: number;
}
