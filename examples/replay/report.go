package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/extevict/extevict/internal/sim"
)

// A Report is what -json prints.
type Report struct {
	Settings []Setting `json:"settings"` // what was replayed, and how
	Policies []Summary `json:"policies"` // in the order of the table

	work *work
}

// A Setting is one thing that the result depends on.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// A Summary is what came of one policy. A class without a request has zeros.
type Summary struct {
	Policy string `json:"policy"` // its name for -policies

	Urgent          int     `json:"urgent"`            // requests that came
	UrgentTTFT      Spread  `json:"urgent_ttft"`       // from the client's first attempt; those without a first token as old as they were in the end
	UrgentWait      Spread  `json:"urgent_wait"`       // until an endpoint had the request
	OnTime          float64 `json:"on_time"`           // share of urgent requests with a first token within the target
	UrgentNoToken   int     `json:"urgent_no_token"`   // urgent requests without a first token in the end
	Sheddable       int     `json:"sheddable"`         // requests that were completed
	SheddableTTFT   Spread  `json:"sheddable_ttft"`    // of these, from the client's first attempt
	TokensPerSecond float64 `json:"tokens_per_second"` // of completed sheddable answers

	Evictions     int     `json:"evictions"`
	Wasted        float64 `json:"wasted"`         // share of tokens computed for sheddable requests that evictions threw away
	MostEvictions int     `json:"most_evictions"` // of one request
	GaveUp        int     `json:"gave_up"`        // clients, after too many evictions
	Rejected      int     `json:"rejected"`       // requests that the gateway refused to queue

	DecisionP50US float64 `json:"decision_p50_us"` // wall-clock time of a decision pass, on this machine
	DecisionP99US float64 `json:"decision_p99_us"`

	row    *policyRow
	result *sim.Result
}

// A Spread is how durations are distributed, in ms.
type Spread struct {
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
}

func spread(ascending []time.Duration) Spread {
	q := func(q float64) float64 { return ms(sim.Quantile(ascending, q)) }
	return Spread{q(0.5), q(0.99), q(1)}
}

// unit writes a duration as people do.
func unit(d time.Duration) string {
	if d == 0 {
		return "0 s"
	}
	for _, u := range []struct {
		d    time.Duration
		name string
	}{{time.Second, "s"}, {time.Millisecond, "ms"}, {time.Microsecond, "µs"}} {
		if d >= u.d {
			return fmt.Sprintf("%.4g %s", float64(d)/float64(u.d), u.name)
		}
	}
	return fmt.Sprintf("%d ns", d)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func summarize(row *policyRow, r *sim.Result) Summary {
	us := func(q float64) float64 { return float64(sim.Quantile(r.Decisions, q).Nanoseconds()) / 1000 }
	return Summary{
		Policy: row.key, Urgent: len(r.TTFT), UrgentTTFT: spread(r.TTFT), UrgentWait: spread(r.Waits), OnTime: r.OnTime, UrgentNoToken: r.Unfinished,
		Sheddable: r.SheddableDone, SheddableTTFT: spread(r.SheddableTTFT), TokensPerSecond: r.TokensPerSecond(),
		Evictions: r.Evictions, Wasted: r.Waste, MostEvictions: r.MostEvictions, GaveUp: r.GaveUp, Rejected: r.Rejected,
		DecisionP50US: us(0.5), DecisionP99US: us(0.99),
		row: row, result: r,
	}
}

func (r *Report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// columns are the table's, as groups that share a heading.
var columns = []struct{ group, name, unit string }{
	{"urgent TTFT", "p50", "ms"}, {"urgent TTFT", "p99", "ms"}, {"urgent TTFT", "max", "ms"},
	{"", "on time", "%"},
	{"sheddable TTFT", "p50", "s"}, {"sheddable TTFT", "p99", "s"}, {"sheddable TTFT", "max", "s"},
	{"sheddable", "tokens", "1/s"},
	{"evictions", "all", ""}, {"evictions", "waste", "%"}, {"evictions", "most", "of one"}, {"evictions", "gave up", "clients"},
	{"decision", "p50", "us"}, {"decision", "p99", "us"},
}

// cells are a policy's in the table.
func (s *Summary) cells() []string {
	cells := []string{"-", "-", "-", "-", "-", "-", "-", "-", fmt.Sprint(s.Evictions), fmt.Sprintf("%.2f", 100*s.Wasted), fmt.Sprint(s.MostEvictions), fmt.Sprint(s.GaveUp), fmt.Sprintf("%.1f", s.DecisionP50US), fmt.Sprintf("%.1f", s.DecisionP99US)}
	if t := s.UrgentTTFT; s.Urgent > 0 {
		copy(cells, []string{fmt.Sprintf("%.0f", t.P50), fmt.Sprintf("%.0f", t.P99), fmt.Sprintf("%.0f", t.Max), fmt.Sprintf("%.1f", 100*s.OnTime)})
	}
	if t := s.SheddableTTFT; s.Sheddable > 0 {
		copy(cells[4:], []string{fmt.Sprintf("%.1f", t.P50/1000), fmt.Sprintf("%.1f", t.P99/1000), fmt.Sprintf("%.1f", t.Max/1000), fmt.Sprintf("%.0f", s.TokensPerSecond)})
	}
	return cells
}

func (r *Report) writeText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	group, names, units := []string{""}, []string{"policy"}, []string{""}
	for i, c := range columns {
		if i > 0 && c.group == columns[i-1].group {
			c.group = ""
		}
		group, names, units = append(group, c.group), append(names, c.name), append(units, c.unit)
	}
	for _, row := range [][]string{group, names, units} {
		fmt.Fprintln(t, strings.Join(row, "\t")+"\t")
	}
	for i := range r.Policies {
		s := &r.Policies[i]
		fmt.Fprintln(t, s.row.name+"\t"+strings.Join(s.cells(), "\t")+"\t")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s\n", r.inWords())
	return err
}

// find returns the summary of a policy; nil if it was not replayed.
func (r *Report) find(key string) *Summary {
	for i := range r.Policies {
		if r.Policies[i].Policy == key {
			return &r.Policies[i]
		}
	}
	return nil
}

// inWords says what came of ours, beside what there is to compare it with.
func (r *Report) inWords() string {
	ours := r.find("ours")
	if ours == nil {
		return "Of one replay: differences of a few percent may be chance, which other values of -seed tell."
	}
	said := func(s *Summary) string {
		return fmt.Sprintf("%.1f %% of %d urgent requests have their first token within %s", 100*s.OnTime, s.Urgent, unit(r.work.target))
	}
	text := "With eviction " + said(ours)
	var others []string
	for _, o := range []struct{ key, as string }{{"gate", "with the same admission but no eviction"}, {"none", "with a gauge and no eviction"}, {"alone", "without sheddable work"}} {
		if s := r.find(o.key); s != nil {
			others = append(others, fmt.Sprintf("%.1f %% %s", 100*s.OnTime, o.as))
		}
	}
	if len(others) > 0 {
		text += " (" + strings.Join(others, ", ") + ")"
	}
	text += fmt.Sprintf(". It takes %d evictions", ours.Evictions)
	if gate := r.find("gate"); gate != nil && gate.TokensPerSecond > 0 {
		text += fmt.Sprintf(" and leaves sheddable work %.1f %% of the tokens that it has without eviction", 100*ours.TokensPerSecond/gate.TokensPerSecond)
	}
	return text + ".\nThis is one replay: differences of a few percent may be chance, which other values of -seed tell."
}

// settings are what the result depends on.
func (w *work) settings() (s []Setting) {
	add := func(name, format string, a ...any) { s = append(s, Setting{name, fmt.Sprintf(format, a...)}) }
	c := &w.config
	urgent, sheddable := w.arrivals()
	for _, in := range w.inputs {
		add(map[string]string{"both": "trace", "urgent": "urgent trace", "sheddable": "sheddable trace"}[in.class], "%s, %d requests", in.name, len(in.records))
	}
	if w.trace != "" {
		add("sheddable", "priority below %d", w.line)
		add("requests that come", "%d urgent, %d sheddable", urgent, sheddable)
	} else {
		add("requests that come", "%d urgent; sheddable as %d clients ask, one at a time", urgent, c.Workers)
	}
	if w.tooLarge > 0 {
		add("left out", "%d requests of %d tokens or more", w.tooLarge, w.largest())
	}
	add("speed", "%g times the trace's", c.Scale)
	add("duration", "%s", unit(c.Duration.Round(time.Second)))
	if w.trace == "" {
		add("first urgent request", "after %s", unit(c.Warm))
	}
	add("endpoints", "%d, each with a KV cache of %d tokens, %d requests and %d tokens a step at most", c.Endpoints, c.Engine.Blocks*blockSize, w.seqs, w.batch)
	add("a step takes", "%s, and %s a prompt token, %s an answer token, %s a token in the cache", unit(w.cost.Step), unit(w.cost.Prefill), unit(w.cost.Decode), unit(w.cost.KV))
	shared := "no"
	if w.sharePrefix {
		shared = "yes"
	}
	add("prefix sharing", "%s", shared)
	add("an abort", "takes effect after %s, is confirmed after %s", unit(w.abortLag), unit(w.confirm))
	add("samples", "every %s, %s late", unit(w.sample), unit(w.sampleLag))
	add("evicted clients", "%s", map[sim.Retry]string{
		sim.Backoff: "come again in 0.5 s * 2^n, up to 6 times", sim.Immediate: "come again at once, up to 6 times",
		sim.RetryAfter: "come again when the gateway says, up to 6 times", sim.Never: "don't come again",
	}[w.retry])
	add("TTFT target", "%s", unit(w.target))
	victims := "any sheddable request"
	if w.unstarted {
		victims = "sheddable requests without a first token"
	}
	add("ours", "ceiling %g, sheddable ceiling %g, evicts %s", w.ceiling, w.sheddableCeiling, victims)
	add("gauge", "evicts 2 at a time, grace %s", unit(w.grace))
	add("concurrency", "%d requests an endpoint", w.concurrency)
	add("seed", "%d", w.seed)
	return s
}
