package main

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"regexp"
	"strconv"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/extevict/extevict/internal/sim"
)

var (
	ink   = rgb(0x333333)
	grid  = rgb(0xe4e4e4)
	alert = rgb(0xc4002b) // evictions
)

// mostShown is how many endpoints have a strip in the plots of usage.
const mostShown = 8

// newPlot is an empty plot in the page's style.
func newPlot(x, y string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.Transparent
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Label.TextStyle.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: 9}
		a.Tick.Label.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: 8}
		a.Label.TextStyle.Color, a.Tick.Label.Color = ink, ink
		a.LineStyle = draw.LineStyle{Color: rgb(0x999999), Width: 0.5}
		a.Tick.LineStyle = a.LineStyle
		a.Tick.Length = 3
		a.Padding = 0
	}
	p.X.Label.Text, p.Y.Label.Text = x, y
	return p
}

// steps are ticks of an axis at round distances.
func steps(lo, hi float64, atMost int) (ts []plot.Tick) {
	by := math.Pow(10, math.Floor(math.Log10((hi-lo)/float64(atMost))))
	for _, f := range []float64{1, 2, 5, 10} {
		if by*f*float64(atMost) >= hi-lo {
			by *= f
			break
		}
	}
	for i := math.Ceil(lo / by); i*by <= hi+by*1e-9; i++ {
		ts = append(ts, plot.Tick{Value: i * by, Label: fmt.Sprintf("%g", i*by)})
	}
	return ts
}

// span is an axis of durations, logarithmic.
type span struct{ lo, hi float64 } // ms

// over is the span of some ascending durations, but for the fastest: a decade at least, and
// nothing below 1 ms.
func over(all [][]time.Duration) span {
	s := span{math.Inf(1), 10}
	for _, ds := range all {
		if len(ds) > 0 {
			s.lo, s.hi = math.Min(s.lo, ms(sim.Quantile(ds, 0.02))), math.Max(s.hi, ms(ds[len(ds)-1]))
		}
	}
	s.lo = math.Max(math.Min(s.lo, s.hi/10), 1)
	return span{s.lo * 0.95, s.hi * 1.05}
}

func (s span) ticks() (ts []plot.Tick) {
	for e := math.Floor(math.Log10(s.lo)); e <= math.Log10(s.hi); e++ {
		for f := 1.0; f < 10; f++ {
			v := f * math.Pow(10, e)
			t := plot.Tick{Value: v}
			if f == 1 || (f == 2 || f == 5) && s.hi/s.lo < 1e4 {
				t.Label = fmt.Sprintf("%g ms", v)
				if v >= 1000 {
					t.Label = fmt.Sprintf("%g s", v/1000)
				}
			}
			if v >= s.lo && v <= s.hi {
				ts = append(ts, t)
			}
		}
	}
	return ts
}

// least is the smallest share that plots of distributions show.
const least = 0.001

// tail plots which share of some durations is at least as long as what the x axis says: one
// line for each policy. A share on a logarithmic axis shows the few that are slow, of which
// the usual plot of a distribution shows nothing.
func tail(s span, target time.Duration, rows []Summary, get func(*sim.Result) []time.Duration) *plot.Plot {
	p := newPlot("", "")
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker = plot.ConstantTicks(s.ticks())
	p.Y.Tick.Marker = plot.ConstantTicks{{Value: 1, Label: "100 %"}, {Value: 0.5, Label: "50 %"}, {Value: 0.1, Label: "10 %"}, {Value: 0.05}, {Value: 0.01, Label: "1 %"}, {Value: 0.005}, {Value: 0.001, Label: "0.1 %"}}
	p.Add(lines{p.X.Tick.Marker, p.Y.Tick.Marker})
	if t := ms(target); t > s.lo && t < s.hi {
		p.Add(mark{t, "target " + unit(target)})
	}
	for i := range rows {
		ds := get(rows[i].result)
		if len(ds) == 0 {
			continue
		}
		var pts plotter.XYs
		n := float64(len(ds))
		for k, next := 0, 0.0; k < len(ds); k++ {
			share := (n - float64(k)) / n
			if math.Log(share) > next && k > 0 && k < len(ds)-1 {
				continue // a thousandth of the axis apart is enough
			}
			next = math.Log(share) + math.Log(least)/300
			pts = append(pts, plotter.XY{X: math.Min(math.Max(ms(ds[k]), s.lo), s.hi), Y: share})
		}
		pts = append([]plotter.XY{{X: s.lo, Y: 1}}, pts...)
		pts = append(pts, plotter.XY{X: pts[len(pts)-1].X, Y: least})
		l := &plotter.Line{XYs: pts, StepStyle: plotter.PreStep, LineStyle: rows[i].row.style(1.4)}
		if rows[i].Policy == "ours" {
			l.LineStyle.Width = 2.6
		}
		p.Add(l)
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = s.lo, s.hi, least, 1
	return p
}

func (r *policyRow) style(width float64) draw.LineStyle {
	s := draw.LineStyle{Color: r.color, Width: vg.Points(width)}
	for _, d := range r.dashes {
		s.Dashes = append(s.Dashes, vg.Points(d))
	}
	return s
}

// lines is a grid at ticks with a label.
type lines struct{ x, y plot.Ticker }

func (g lines) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	sty := draw.LineStyle{Color: grid, Width: 0.5}
	for _, t := range g.x.Ticks(p.X.Min, p.X.Max) {
		if t.Label != "" && t.Value >= p.X.Min && t.Value <= p.X.Max {
			c.StrokeLine2(sty, x(t.Value), c.Min.Y, x(t.Value), c.Max.Y)
		}
	}
	for _, t := range g.y.Ticks(p.Y.Min, p.Y.Max) {
		if t.Label != "" && t.Value >= p.Y.Min && t.Value <= p.Y.Max {
			c.StrokeLine2(sty, c.Min.X, y(t.Value), c.Max.X, y(t.Value))
		}
	}
}

// mark is a vertical line with a text.
type mark struct {
	x    float64
	text string
}

func (m mark) Plot(c draw.Canvas, p *plot.Plot) {
	x, _ := p.Transforms(&c)
	c.StrokeLine2(draw.LineStyle{Color: alert, Width: 0.8, Dashes: []vg.Length{2, 2}}, x(m.x), c.Min.Y, x(m.x), c.Max.Y)
	sty := p.X.Tick.Label
	sty.Color, sty.XAlign, sty.YAlign = alert, draw.XCenter, draw.YBottom
	at := x(m.x)
	at = min(max(at, c.Min.X+sty.Width(m.text)/2), c.Max.X-sty.Width(m.text)/2)
	c.FillText(sty, vg.Point{X: at, Y: c.Max.Y + 1}, m.text)
}

// labelled draws a plot with labels for its axes. The plot's own ones are out of place where
// a scale is logarithmic.
func labelled(c draw.Canvas, p *plot.Plot, x, y string) {
	const room = 14
	in := draw.Crop(c, room, -10, room, -12)
	data := p.DataCanvas(in)
	p.Draw(in)
	sty := p.X.Label.TextStyle
	sty.XAlign, sty.YAlign = draw.XCenter, draw.YBottom
	c.FillText(sty, vg.Point{X: data.Center().X, Y: c.Min.Y + 3}, x)
	sty.Rotation, sty.YAlign = math.Pi/2, draw.YTop
	c.FillText(sty, vg.Point{X: c.Min.X, Y: data.Center().Y}, y)
}

// notches are short vertical lines at times, between two heights.
type notches struct {
	xs     []float64
	lo, hi float64
}

func (n notches) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, v := range n.xs {
		c.StrokeLine2(draw.LineStyle{Color: alert, Width: 0.8}, x(v), y(n.lo), x(v), y(n.hi))
	}
}

// bin is how long urgent requests that are late are counted for one bar.
const bin = 5 * time.Second

// lateBins is how many late urgent requests came in each bin.
func lateBins(r *sim.Result) []int {
	bins := make([]int, r.Duration/bin+1)
	for _, at := range r.Late {
		bins[min(int(at/bin), len(bins)-1)]++
	}
	return bins
}

// bars are counts in bins.
type bars []int

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, n := range b {
		if n > 0 {
			from, to := x(float64(i)*bin.Seconds()), min(x(float64(i+1)*bin.Seconds()), c.Max.X)
			c.FillPolygon(rgb(0x6b5b95), []vg.Point{{X: from, Y: y(0)}, {X: from, Y: y(float64(n))}, {X: to - 0.4, Y: y(float64(n))}, {X: to - 0.4, Y: y(0)}})
		}
	}
}

// strips plots one policy over time: how many urgent requests were late, and below it each
// endpoint's usage of its KV cache and its evictions.
func strips(s *Summary, names []string, mostLate int) template.HTML {
	r := s.result
	end := r.Duration.Seconds()
	x := steps(0, end, 10)
	bare := make([]plot.Tick, len(x))
	for i, t := range x {
		bare[i] = plot.Tick{Value: t.Value}
	}
	var rows [][]*plot.Plot
	add := func(label string, ticks []plot.Tick, top float64, ps ...plot.Plotter) {
		p := newPlot("", label)
		p.X.Tick.Marker, p.Y.Tick.Marker = plot.ConstantTicks(bare), plot.ConstantTicks(ticks)
		p.Add(lines{plot.ConstantTicks(x), p.Y.Tick.Marker})
		p.Add(ps...)
		p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, end, 0, top
		rows = append(rows, []*plot.Plot{p})
	}
	top := float64(max(mostLate, 1))
	add("late", []plot.Tick{{Value: 0, Label: "0"}, {Value: top, Label: fmt.Sprint(top)}}, top, bars(lateBins(r)))
	for number, name := range names {
		pts := plotter.XYs{}
		for _, u := range r.Usage {
			if u.Endpoint == name {
				pts = append(pts, plotter.XY{X: u.At.Seconds(), Y: u.KV})
			}
		}
		var evicted []float64
		for _, e := range r.Evicted {
			if e.Endpoint == name {
				evicted = append(evicted, e.At.Seconds())
			}
		}
		fill := rgb(0x0062a8)
		ps := []plot.Plotter{notches{evicted, 1.06, 1.3}}
		if len(pts) > 0 {
			ps = append(ps, &plotter.Line{
				XYs: pts, LineStyle: draw.LineStyle{Color: fill, Width: 0.7},
				FillColor: color.NRGBA{fill.R, fill.G, fill.B, 40},
			})
		}
		add("KV "+strconv.Itoa(number), []plot.Tick{{Value: 0, Label: "0"}, {Value: 0.5}, {Value: 1, Label: "100 %"}}, 1.35, ps...)
	}
	last := rows[len(rows)-1][0]
	last.X.Tick.Marker = plot.ConstantTicks(x)
	last.X.Label.Text = "time, s"
	h := vg.Length(len(rows))*44 + 30
	return svg(460, h, fmt.Sprintf("KV usage of each endpoint over time, policy %s", s.row.name), func(c draw.Canvas) {
		at := plot.Align(rows, draw.Tiles{Rows: len(rows), Cols: 1, PadY: 5, PadTop: 4, PadRight: 6}, c)
		for i := range rows {
			rows[i][0].Draw(at[i][0])
		}
	})
}

// root is the start of an SVG document until its attribute viewBox.
var root = regexp.MustCompile(`(?s)^.*?<svg [^>]*?(viewBox="[^"]*")[^>]*>`)

// svg draws a picture to stand in a page: as wide as there is room, and described.
func svg(width, height vg.Length, about string, paint func(draw.Canvas)) template.HTML {
	c := vgsvg.New(width, height)
	paint(draw.New(c))
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		panic(err) // a Buffer has no errors
	}
	text := root.ReplaceAllString(b.String(), fmt.Sprintf(`<svg $1 role="img" aria-label="%s">`, template.HTMLEscapeString(about)))
	return template.HTML(text)
}
