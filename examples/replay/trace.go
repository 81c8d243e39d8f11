package main

import (
	"bytes"
	"embed"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/sim"
)

//go:embed testdata/urgent.csv testdata/sheddable.csv
var bundled embed.FS

// blockSize is the number of tokens in a KV block.
const blockSize = 16

// work is what is to be replayed.
type work struct {
	*options
	config   sim.Config
	inputs   []input
	span     time.Duration // of what comes by its timestamps, as it is replayed
	tooLarge int           // requests that are left out
}

// input is a trace.
type input struct {
	name    string // of its file
	bundled bool
	class   string // urgent, sheddable or both
	records []sim.Record
}

// read reads a trace; "" is the bundled one of the class. An error names the file, and
// the line where there is one.
func read(name, class string) (input, error) {
	in := input{name: name, class: class}
	var text []byte
	var err error
	if name == "" {
		in.name, in.bundled = "bundled "+class+".csv", true
		text, err = bundled.ReadFile("testdata/" + class + ".csv")
	} else {
		in.name = filepath.Base(name)
		text, err = os.ReadFile(name)
	}
	if err != nil {
		return in, err
	}
	if in.records, err = sim.ReadTrace(bytes.NewReader(text)); err != nil {
		return in, fmt.Errorf("%s: %s", name, strings.TrimPrefix(err.Error(), "sim: "))
	}
	return in, nil
}

// load reads the traces and lays out the simulation.
func (o *options) load() (*work, error) {
	w := &work{options: o, config: sim.Config{
		Seed: o.seed, Endpoints: o.endpoints, Target: o.target, SharePrefix: o.sharePrefix,
		Engine:  engine.Config{BlockSize: blockSize, Blocks: o.kv / blockSize, MaxSeqs: o.seqs, MaxBatchedTokens: o.batch, Cost: o.cost, AbortLag: o.abortLag},
		Confirm: max(o.confirm, 1), Sample: o.sample, SampleLag: o.sampleLag, Retry: o.retry,
	}}
	c := &w.config
	c.Engine.AbortLag = max(c.Engine.AbortLag, 1) // 0 would be the default
	c.Scale = o.scale
	if o.trace != "" {
		if err := w.loadOne(); err != nil {
			return nil, err
		}
	} else if err := w.loadTwo(); err != nil {
		return nil, err
	}
	last := c.Urgent[len(c.Urgent)-1].At
	w.span = time.Duration(float64(last) / c.Scale)
	if c.Duration = o.duration; c.Duration == 0 {
		c.Duration = c.Warm + min(w.span, longest).Truncate(time.Second) + 5*time.Second // for the last to finish
	}
	c.Record = max(c.Duration/400, 50*time.Millisecond)
	if !o.concurrencyGiven {
		o.concurrency = w.average()
	}
	return w, nil
}

// loadOne takes a trace with priorities.
func (w *work) loadOne() error {
	in, err := read(w.trace, "both")
	if err != nil {
		return err
	}
	w.inputs = []input{in}
	prioritized, urgent := false, false
	for i := range in.records {
		r := &in.records[i]
		prioritized = prioritized || r.Prioritized
		r.Priority -= w.line // the simulator's line is 0
		urgent = urgent || r.Priority >= 0
	}
	switch {
	case !prioritized:
		return fmt.Errorf("%s has no priorities: name it as -urgent or -sheddable, or add a column Priority, or a field priority", w.trace)
	case !urgent:
		return fmt.Errorf("%s has no request of priority %d or above: see -evict-below", w.trace, w.line)
	}
	c := &w.config
	c.Warm = 1 // 0 would be the default
	c.Urgent, err = w.fitting(in)
	return err
}

// loadTwo takes a trace of urgent requests and one of others.
func (w *work) loadTwo() error {
	c := &w.config
	c.Warm = warm
	urgent, err := read(w.urgent, "urgent")
	if err != nil {
		return err
	}
	sheddable, err := read(w.sheddable, "sheddable")
	if err != nil {
		return err
	}
	w.inputs = []input{urgent, sheddable}
	for i := range urgent.records {
		urgent.records[i].Priority = 0
	}
	if c.Urgent, err = w.fitting(urgent); err != nil {
		return err
	}
	if c.Sheddable, err = w.fitting(sheddable); err != nil {
		return err
	}
	if urgent.bundled && !w.scaleGiven {
		c.Scale = 2
	}
	if !w.workersGiven {
		w.workers = 100 * w.endpoints
	}
	c.Workers = w.workers
	return nil
}

// largest is how many tokens a request must stay below: the simulator leaves out what
// takes most of an endpoint for itself.
func (w *work) largest() int { return w.config.Engine.Blocks * blockSize * 6 / 10 }

// fitting are the records that aren't too large.
func (w *work) fitting(in input) (rs []sim.Record, err error) {
	urgent := false
	for _, r := range in.records {
		if r.Prompt+r.Output < w.largest() {
			rs = append(rs, r)
			urgent = urgent || r.Priority >= 0
		}
	}
	w.tooLarge += len(in.records) - len(rs)
	if len(rs) == 0 || in.class != "sheddable" && !urgent {
		return nil, fmt.Errorf("%s: each request has %d tokens or more, 60 %% of an endpoint's KV cache: see -kv", in.name, w.largest())
	}
	return rs, nil
}

// average is how many requests fit in 80 % of an endpoint's KV cache, when they are half done.
func (w *work) average() int {
	rs := w.config.Sheddable
	if len(rs) == 0 {
		rs = w.config.Urgent
	}
	sum := 0.0
	for _, r := range rs {
		sum += float64(r.Prompt) + float64(r.Output)/2
	}
	n := 0.8 * float64(w.kv) / (sum / float64(len(rs)))
	return int(math.Min(math.Max(n, 1), float64(w.seqs)))
}

// arrivals is how many requests of each class come by their timestamps.
func (w *work) arrivals() (urgent, sheddable int) {
	for _, r := range w.config.Urgent {
		switch at := w.config.Warm + time.Duration(float64(r.At)/w.config.Scale); {
		case at >= w.config.Duration:
		case r.Priority >= 0:
			urgent++
		default:
			sheddable++
		}
	}
	return urgent, sheddable
}

// about says in one line what is replayed.
func (w *work) about() string {
	c := &w.config
	urgent, sheddable := w.arrivals()
	backlog := fmt.Sprintf("%d sheddable ones", sheddable)
	if w.trace == "" {
		backlog = fmt.Sprintf("%d clients with a backlog of sheddable ones", c.Workers)
	}
	s := fmt.Sprintf("%s of %d urgent requests and %s, on %d endpoints with a KV cache of %d tokens", unit(c.Duration.Round(time.Second)), urgent, backlog, c.Endpoints, w.kv)
	if w.tooLarge > 0 {
		s += fmt.Sprintf("; %d requests of %d tokens or more are left out", w.tooLarge, w.largest())
	}
	return s
}
