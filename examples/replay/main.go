// Replay shows what eviction is worth for a pool of endpoints and its traffic, before
// anything is deployed. It replays a trace of requests against simulated engines, once
// for each policy, prints a comparison and writes a page of plots:
//
//	go run ./examples/replay
//	go run ./examples/replay -trace traffic.jsonl -evict-below 5 -endpoints 8 -kv 400000
//
// The gateway that it simulates decides with the code of package flowcontrol. -h says
// what a trace looks like. With -json it prints a [Report].
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/sim"
)

func main() {
	os.Exit(command(os.Args[1:], os.Stdout, os.Stderr))
}

// options are what the flags say.
type options struct {
	trace, urgent, sheddable string // files
	line                     int
	scale                    float64
	duration                 time.Duration
	workers                  int
	seed                     uint64

	endpoints, kv, seqs, batch  int
	cost                        engine.Cost
	abortLag, confirm           time.Duration
	sample, sampleLag           time.Duration
	sharePrefix                 bool
	retry                       sim.Retry
	target                      time.Duration
	ceiling, sheddableCeiling   float64
	unstarted                   bool
	grace                       time.Duration
	concurrency                 int
	policies                    []*policyRow
	html                        string
	json, quiet                 bool
	scaleGiven, workersGiven    bool
	concurrencyGiven, showsHTML bool
}

const usage = `Replays requests against simulated engines, once for each policy of admission and
eviction, and compares what came of them. Nothing is sent anywhere.

The bundled traces, code completion over a backlog of chats:

  replay

Your traffic in one trace that has priorities: what is below -evict-below may wait and
may be evicted, and the rest is urgent:

  replay -trace traffic.csv -evict-below 5

Two traces without priorities, urgent requests as they come and a backlog of others that
-workers clients work off:

  replay -urgent urgent.csv -sheddable batch.jsonl -workers 200

A trace is CSV with a header, as Azure publishes it, with a column for the priority if
there is one, and a time or seconds for the timestamp:

  TIMESTAMP,ContextTokens,GeneratedTokens,Priority
  2026-01-31 12:00:00.25,374,44,10

or JSON lines, as Mooncake publishes it, with milliseconds for the timestamp; hash_ids, of
the prompt's blocks of 512 tokens, and priority, where higher matters more, may be missing:

  {"timestamp": 250, "input_length": 374, "output_length": 44, "hash_ids": [7], "priority": 10}

Flags:
`

// ending ends the usage.
const ending = `
Policies, for -policies:
%s
The exit code is 0 when all is replayed, 1 if a result can't be written, 2 for bad flags
and traces. Progress goes to stderr, the result to stdout. The same flags and traces give
the same result, but for the times of decisions.
`

// warm is how long a backlog runs before the first urgent request comes.
const warm = 20 * time.Second

// longest is how much of a trace is replayed by default.
const longest = 10 * time.Minute

// parse reads the command line.
func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{cost: engine.DefaultCost}
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stderr, usage)
		f.PrintDefaults()
		var list strings.Builder
		for _, p := range policyRows {
			fmt.Fprintf(&list, "  %-12s %s\n", p.key, p.about)
		}
		fmt.Fprintf(stderr, ending, list.String())
	}
	f.StringVar(&o.trace, "trace", "", "trace of all requests, `file` with priorities")
	f.IntVar(&o.line, "evict-below", 0, "`priority` below which requests of -trace are sheddable")
	f.StringVar(&o.urgent, "urgent", "", "trace of urgent requests, `file`; the bundled one if empty")
	f.StringVar(&o.sheddable, "sheddable", "", "trace of sheddable requests, `file`; the bundled one if empty")
	f.Float64Var(&o.scale, "scale", 1, "how many `times` as fast as in the trace the requests of -urgent or -trace come;\nthe bundled ones 2 unless given")
	f.IntVar(&o.workers, "workers", 0, "`clients` with one sheddable request each at a time; 100 for each endpoint unless given")
	f.DurationVar(&o.duration, "duration", 0, "how long to replay, in the trace's `time` as -scale makes it; 0 is to the trace's\nend, or "+fmt.Sprint(longest.Minutes())+" minutes of it")
	f.Uint64Var(&o.seed, "seed", 1, "`number` that all that is random comes of")

	f.IntVar(&o.endpoints, "endpoints", 4, "`number` of endpoints, 1 to 256")
	f.IntVar(&o.kv, "kv", 48_000, "KV cache of each, in `tokens`, 1024 at least")
	f.IntVar(&o.seqs, "seqs", 256, "most `requests` that an endpoint runs at once")
	f.IntVar(&o.batch, "batch", 2048, "most `tokens` that an engine computes in a step, not fewer than -seqs")
	f.DurationVar(&o.cost.Step, "step", o.cost.Step, "what a step of an engine takes, a constant `time`. This, and what it takes more for\neach token, are of the order of an 8B model on one H100")
	f.DurationVar(&o.cost.Prefill, "step-prefill", o.cost.Prefill, "more `time` for each prompt token")
	f.DurationVar(&o.cost.Decode, "step-decode", o.cost.Decode, "more `time` for each answer token")
	f.DurationVar(&o.cost.KV, "step-kv", o.cost.KV, "more `time` for each token in the KV cache")
	f.DurationVar(&o.abortLag, "abort-lag", 20*time.Millisecond, "`time` from an abort until the engine acts on it")
	f.DurationVar(&o.confirm, "confirm", 3*time.Millisecond, "`time` from an abort until its stream has ended for the gateway")
	f.DurationVar(&o.sample, "sample", 50*time.Millisecond, "`time` between two samples of an endpoint's usage")
	f.DurationVar(&o.sampleLag, "sample-lag", 0, "`time` until the gateway has a sample")
	f.BoolVar(&o.sharePrefix, "share-prefix", false, "engines share the blocks of prompts that the trace's hash_ids say are the same")
	f.Func("retry", "what a client does, a `word`, whose request was evicted: backoff (comes again in 0.5 s * 2^n), immediate,\nretry-after (when the gateway says), or never; at most 6 times (default backoff)", o.parseRetry)

	f.DurationVar(&o.target, "target", 500*time.Millisecond, "`time` in which an urgent request wants its first token")
	f.Float64Var(&o.ceiling, "ceiling", 0.97, "how full an endpoint may be, a `share` of its KV cache")
	f.Float64Var(&o.sheddableCeiling, "sheddable-ceiling", 0.90, "the same when sheddable work starts, a `share`")
	f.BoolVar(&o.unstarted, "unstarted", false, "evict only requests without a first token")
	f.DurationVar(&o.grace, "grace", 2300*time.Millisecond, "`time` for which policy gauge waits after an eviction")
	f.IntVar(&o.concurrency, "concurrency", 0, "`requests` at once on an endpoint, for policy concurrency; what fits in 80 % of the KV cache\non average unless given")
	names := f.String("policies", "", "`names` of the policies to compare, separated by commas; all if empty")

	f.StringVar(&o.html, "html", "replay.html", "`file` for the page of plots; none to write none")
	f.BoolVar(&o.json, "json", false, "print the result as JSON")
	f.BoolVar(&o.quiet, "q", false, "show no progress")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	o.scaleGiven, o.workersGiven, o.concurrencyGiven = given["scale"], given["workers"], given["concurrency"]
	o.showsHTML = o.html != "none"
	err := o.check(f.Args(), given)
	if err == nil {
		o.policies, err = choose(*names)
	}
	if err != nil {
		return nil, fmt.Errorf("%w (-h shows all flags)", err)
	}
	return o, nil
}

func (o *options) parseRetry(text string) error {
	names := []string{"backoff", "immediate", "retry-after", "never"}
	i := slices.Index(names, text)
	if i < 0 {
		return errors.New("want " + strings.Join(names, ", "))
	}
	o.retry = []sim.Retry{sim.Backoff, sim.Immediate, sim.RetryAfter, sim.Never}[i]
	return nil
}

// check says what is wrong with the options.
func (o *options) check(rest []string, given map[string]bool) error {
	share := func(v float64) bool { return v > 0 && v <= 1 }
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q: a trace is named by -trace, or by -urgent and -sheddable", rest[0])
	case o.trace != "" && (o.urgent != "" || o.sheddable != "" || given["workers"]):
		return errors.New("-trace has all requests: -urgent, -sheddable and -workers don't go with it")
	case o.trace == "" && given["evict-below"]:
		return errors.New("-evict-below is for -trace: -urgent and -sheddable say themselves what is sheddable")
	case !(o.scale > 0 && o.scale <= 1e6):
		return errors.New("-scale must be above 0 and at most 1000000")
	case o.duration < 0 || given["duration"] && o.trace == "" && o.duration <= warm:
		return fmt.Errorf("-duration must be more than %v, after which urgent requests come", warm)
	case o.duration > 24*time.Hour:
		return errors.New("-duration must be 24h at most")
	case o.workers < 0 || o.workers > 100_000:
		return errors.New("-workers must be 0 to 100000")
	case o.endpoints < 1 || o.endpoints > 256:
		return errors.New("-endpoints must be 1 to 256")
	case o.kv < 1024 || o.kv > 1<<30:
		return fmt.Errorf("-kv must be 1024 to %d", 1<<30)
	case o.seqs < 1 || o.batch < o.seqs || o.batch > 1<<20:
		return fmt.Errorf("-seqs must be at least 1, and -batch -seqs to %d", 1<<20)
	case o.cost.Step <= 0 || min(o.cost.Prefill, o.cost.Decode, o.cost.KV) < 0 ||
		max(o.cost.Step, o.cost.Prefill, o.cost.Decode, o.cost.KV) > time.Minute:
		return errors.New("-step must be positive, and -step-prefill, -step-decode and -step-kv not negative, and all 1m at most")
	case min(o.abortLag, o.confirm, o.sampleLag, o.grace) < 0:
		return errors.New("-abort-lag, -confirm, -sample-lag and -grace must not be negative")
	case o.sample < time.Millisecond:
		return errors.New("-sample must be 1ms at least")
	case o.target <= 0:
		return errors.New("-target must be positive")
	case !share(o.ceiling) || !share(o.sheddableCeiling):
		return errors.New("-ceiling and -sheddable-ceiling must be above 0 and at most 1")
	case given["concurrency"] && (o.concurrency < 1 || o.concurrency > math.MaxInt32):
		return errors.New("-concurrency must be at least 1")
	case o.html == "":
		return errors.New("-html needs a file, or none")
	}
	if o.showsHTML {
		if s, err := os.Stat(o.html); err == nil && s.IsDir() {
			return fmt.Errorf("-html: %s is a folder", o.html)
		}
		if _, err := os.Stat(filepath.Dir(o.html)); err != nil {
			return fmt.Errorf("-html: %w", err)
		}
	}
	return nil
}

// command is the program. It returns the exit code.
func command(args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	var w *work
	if err == nil {
		w, err = o.load()
	}
	if err != nil {
		fmt.Fprintln(stderr, "replay:", err)
		return 2
	}
	p := &progress{w: stderr, quiet: o.quiet, live: isTerminal(stderr)}
	p.line("%s", w.about())
	r := w.run(p)
	if o.json {
		err = r.writeJSON(stdout)
	} else {
		err = r.writeText(stdout)
	}
	if err == nil && o.showsHTML {
		if err = r.writeFile(o.html); err == nil {
			p.line("plots are in %s", o.html)
		}
	}
	if err != nil {
		fmt.Fprintln(stderr, "replay:", err)
		return 1
	}
	return 0
}

// isTerminal reports whether a person sees what is written to w.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	s, err := f.Stat()
	return err == nil && s.Mode()&os.ModeCharDevice != 0
}

// progress shows how far the work is: on a terminal in a line that is written over and
// over, else in a line for each policy.
type progress struct {
	w           io.Writer
	quiet, live bool
}

func (p *progress) line(format string, a ...any) {
	if !p.quiet {
		fmt.Fprintf(p.w, p.erase()+format+"\n", a...)
	}
}

func (p *progress) now(format string, a ...any) {
	if !p.quiet && p.live {
		fmt.Fprintf(p.w, p.erase()+format, a...)
	}
}

func (p *progress) erase() string {
	if p.live {
		return "\r\x1b[K"
	}
	return ""
}
