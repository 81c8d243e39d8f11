package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"os"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot/vg/draw"

	"github.com/extevict/extevict/internal/sim"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

// figure is a plot with its words.
type figure struct {
	Title, Read string
	SVG         template.HTML
}

// tableRow is a policy in the page's table and legends.
type tableRow struct {
	Key, Name, About string
	Swatch           template.HTML
	Cells            []string
}

// heading is one over some columns of the table.
type heading struct {
	Text string
	Span int
}

// writePage writes the page. It needs nothing but itself.
func (r *Report) writePage(b *bytes.Buffer) error {
	d := struct {
		About, Target string
		Words         []string
		Groups        []heading
		Columns       []struct{ Name, Unit string }
		Rows          []tableRow
		Tails, Usage  []figure
		ReadUsage     string
		Settings      []Setting
		Bundled       bool
	}{About: r.work.about(), Target: unit(r.work.target), Words: strings.Split(r.inWords(), "\n"), Settings: r.Settings}
	for i, c := range columns {
		if i == 0 || c.group != columns[i-1].group {
			d.Groups = append(d.Groups, heading{c.group, 0})
		}
		d.Groups[len(d.Groups)-1].Span++
		d.Columns = append(d.Columns, struct{ Name, Unit string }{c.name, strings.ReplaceAll(c.unit, "us", "µs")})
	}
	for i := range r.Policies {
		s := &r.Policies[i]
		d.Rows = append(d.Rows, tableRow{s.Policy, s.row.name, r.about(s.row), s.row.swatch(), s.cells()})
	}
	for _, in := range r.work.inputs {
		d.Bundled = d.Bundled || in.bundled
	}
	d.Tails = r.tails()
	d.Usage, d.ReadUsage = r.usage()
	return page.Execute(b, d)
}

// about describes a policy with the numbers that flags gave it.
func (r *Report) about(p *policyRow) string {
	return strings.NewReplacer("-grace", unit(r.work.grace), "-concurrency", fmt.Sprint(r.work.concurrency)).Replace(p.about)
}

// writeFile writes the page to a file.
func (r *Report) writeFile(name string) error {
	var b bytes.Buffer
	if err := r.writePage(&b); err != nil {
		return err
	}
	return os.WriteFile(name, b.Bytes(), 0o644)
}

// swatch is a piece of the policy's line.
func (p *policyRow) swatch() template.HTML {
	width, dashes := 2.0, ""
	if p.key == "ours" {
		width = 4
	}
	if len(p.dashes) > 0 {
		dashes = fmt.Sprintf(` stroke-dasharray="%g %g"`, p.dashes[0], p.dashes[1])
	}
	return template.HTML(fmt.Sprintf(`<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" stroke="#%02x%02x%02x" stroke-width="%g"%s/></svg>`,
		p.color.R, p.color.G, p.color.B, width, dashes))
}

// tails are the plots of distributions.
func (r *Report) tails() []figure {
	urgent := func(r *sim.Result) []time.Duration { return r.TTFT }
	waits := func(r *sim.Result) []time.Duration { return r.Waits }
	sheddable := func(r *sim.Result) []time.Duration { return r.SheddableTTFT }
	all := func(get func(*sim.Result) []time.Duration) (all [][]time.Duration) {
		for i := range r.Policies {
			all = append(all, get(r.Policies[i].result))
		}
		return all
	}
	draws := func(title, read, x string, target time.Duration, get func(*sim.Result) []time.Duration) figure {
		p := tail(over(all(get)), target, r.Policies, get)
		return figure{title, read, svg(460, 250, title, func(c draw.Canvas) { labelled(c, p, x, "share of requests at least as slow") })}
	}
	const ttft = "time to first token, from the client's first attempt"
	fs := []figure{
		draws("TTFT of urgent requests",
			fmt.Sprintf("Where a line crosses 1 %% is that policy's p99: further left is better. Where it crosses the dashed line, the target of %s, is the share that is late.", unit(r.work.target)),
			ttft, r.work.target, urgent),
		draws("Waits of urgent requests",
			"How long the gateway kept an urgent request before an endpoint had it; what was sent on in less than a millisecond is at the left edge. What the TTFT has more is the engine's: its queue and the prefill.",
			"time from offer to endpoint", 0, waits),
	}
	if slices.ContainsFunc(all(sheddable), func(ds []time.Duration) bool { return len(ds) > 0 }) {
		fs = append(fs, draws("TTFT of sheddable requests",
			"The price: how long sheddable requests took, with all that evicted ones waited before they came again. Only completed requests count: what a policy starves, its tokens per second tell.",
			ttft, 0, sheddable))
	}
	return fs
}

// usage are the plots over time, and how to read them.
func (r *Report) usage() (fs []figure, read string) {
	var names []string
	mostLate := 0
	for i := range r.Policies {
		for _, u := range r.Policies[i].result.Usage {
			if !slices.Contains(names, u.Endpoint) {
				names = append(names, u.Endpoint)
			}
		}
		mostLate = max(mostLate, slices.Max(lateBins(r.Policies[i].result)))
	}
	slices.Sort(names)
	read = fmt.Sprintf("On top, how many of the urgent requests that came in each %s got their first token late. Below, KV 0 and so on, a strip for each endpoint: the share of its KV cache in use, and above 100 %% a red notch for each eviction there. All policies have the same scales.", unit(bin))
	if len(names) > mostShown {
		read += fmt.Sprintf(" Of %d endpoints the first %d are shown.", len(names), mostShown)
		names = names[:mostShown]
	}
	for i := range r.Policies {
		s := &r.Policies[i]
		fs = append(fs, figure{Title: s.row.name, Read: r.about(s.row), SVG: strips(s, names, mostLate)})
	}
	return fs, read
}
