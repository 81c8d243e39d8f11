package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// The verdicts.
const (
	yes     = "yes"
	no      = "no"
	unknown = "unknown"
)

// The reasons.
const (
	reasonFreed       = "freed"                // yes: what was evicted is free for others
	reasonRunsOn      = "gateway_runs_on"      // no: the gateway took the eviction and let the request run
	reasonUnevictable = "not_evictable"        // no: the ext_proc server doesn't know running requests any more
	reasonHop         = "hop_keeps_upstream"   // no: something between gateway and engine does not pass the end on
	reasonIgnored     = "engine_ignores_close" // no: the engine goes on when its connection closes
	reasonLeaked      = "engine_leaks"         // no: the engine stops, and keeps slot or KV cache
	reasonNotFreed    = "engine_or_hop"        // no: one of these three
	reasonKV          = "kv_cache_kept"        // no: the engine frees the slot and not the KV cache
	reasonUnreachable = "unreachable"          // unknown: gateway, metrics or admin endpoint don't answer as they should
	reasonHeldBack    = "held_back"            // unknown: the gateway does not stream the responses
	reasonElsewhere   = "runs_elsewhere"       // unknown: the streams don't run on the engine whose metrics these are
	reasonIDs         = "ids_differ"           // unknown: the admin endpoint lists requests, and not by our ids
	reasonDisturbed   = "disturbed"            // unknown: other requests ended in the same moment
	reasonTooShort    = "streams_too_short"    // unknown: a stream ended by itself before there was a result
	reasonTimeout     = "timeout"              // unknown
	reasonInterrupted = "interrupted"          // unknown
)

// A Report is the result, and what -json prints. Fields are added and never changed.
// Times are in milliseconds; null is what did not happen, or could not be seen.
type Report struct {
	Verdict string   `json:"verdict"` // "yes", "no" or "unknown": does eviction free capacity here?
	Reason  string   `json:"reason"`  // one of the reasons, in a word
	Because string   `json:"because"` // the same for people
	Mend    []string `json:"mend"`    // what to change, likeliest first
	Notes   []string `json:"notes"`   // what else is worth knowing

	Engine    *EngineReport `json:"engine"`    // the engine alone, without the gateway; null if it was not asked
	Load      LoadReport    `json:"load"`      // what the check put on
	Evictions []Eviction    `json:"evictions"` // in order: while a request waits, while none does, one that is not streamed
	After     Gauges        `json:"after"`     // when all of the check's requests had been dropped
	TookMS    float64       `json:"took_ms"`
}

// An EngineReport says what the engine does when a stream's connection is closed.
type EngineReport struct {
	Frees   bool     `json:"frees"`    // it ends the request and frees its place
	FreedMS *float64 `json:"freed_ms"` // after the connection was closed, as its metrics show it
	Leaks   bool     `json:"leaks"`    // it ends the request and does not free its place
}

// A LoadReport says what ran before the first eviction.
type LoadReport struct {
	Streams   int    `json:"streams"`   // of the check, with a token at least
	Waiting   int    `json:"waiting"`   // of the check, without
	Saturated bool   `json:"saturated"` // a request had to wait
	Before    Gauges `json:"before"`    // without the check's streams
	Full      Gauges `json:"full"`      // with them
}

// Gauges are the engine's.
type Gauges struct {
	Running *float64 `json:"running"`  // requests
	Waiting *float64 `json:"waiting"`  // requests
	KV      *float64 `json:"kv_cache"` // used part, 0 to 1
}

// An Eviction is what followed when the admin endpoint was told to end a request.
// Times count from the moment at which it was told.
type Eviction struct {
	Streamed bool    `json:"streamed"`
	Tokens   int     `json:"tokens"`   // that its client had
	Waiting  int     `json:"waiting"`  // requests of the check that waited
	AdminMS  float64 `json:"admin_ms"` // until the admin endpoint had answered

	Client  string   `json:"client"`   // how it ended: running, status, error_event_reset, error_event_end, reset, clean_end, complete
	Text    string   `json:"text"`     // the same for people
	Status  int      `json:"status"`   // HTTP
	Code    string   `json:"code"`     // of an error object
	ToldMS  *float64 `json:"told_ms"`  // an error event was there
	EndedMS *float64 `json:"ended_ms"` // the response had ended

	Before    Gauges   `json:"before"`
	After     Gauges   `json:"after"`      // the last that was looked at
	RunningMS *float64 `json:"running_ms"` // running had fallen
	KVMS      *float64 `json:"kv_ms"`      // the KV cache's usage had fallen by half of a stream's part at least; looked at if running falls
	KV        *float64 `json:"kv_cache"`   // to what
	StartedMS *float64 `json:"started_ms"` // a request that had waited had its first token

	Freed bool `json:"freed"` // a waiting request started; or, if none waited, running and KV usage fell
}

// exitCode is for scripts.
func (r *Report) exitCode() int {
	switch r.Verdict {
	case yes:
		return 0
	case no:
		return 1
	}
	return 2
}

func (m sample) gauges() Gauges {
	return Gauges{known(m.running), known(m.waiting), known(m.kv)}
}

func known(f float64) *float64 {
	if math.IsNaN(f) {
		return nil
	}
	return &f
}

// since returns the milliseconds from start to t, or nil if t is zero.
func since(start, t time.Time) *float64 {
	if t.IsZero() {
		return nil
	}
	return new(millis(t.Sub(start)))
}

func millis(d time.Duration) float64 { return math.Round(float64(d)/1e4) / 100 }

// writeJSON writes the report as one object.
func (r *Report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// writeText writes the report for people.
func (r *Report) writeText(out io.Writer) error {
	w := new(strings.Builder)
	p := func(head, format string, a ...any) { fmt.Fprintf(w, "  %-12s  %s\n", head, fmt.Sprintf(format, a...)) }
	if r.Verdict == unknown {
		fmt.Fprintf(w, "eviction frees capacity here: COULD NOT TELL, because %s\n", r.Because)
	} else {
		fmt.Fprintf(w, "eviction frees capacity here: %s, because %s\n", strings.ToUpper(r.Verdict), r.Because)
	}
	for i, m := range r.Mend {
		head := "mend it"
		if i > 0 {
			head = "or"
		}
		p(head, "%s", m)
	}
	fmt.Fprintln(w)
	if e := r.Engine; e != nil {
		switch {
		case e.Frees:
			p("engine alone", "a stream's connection is closed: freed after %s", ms(e.FreedMS))
		case e.Leaks:
			p("engine alone", "a stream's connection is closed: the request stops, and its place is not freed")
		default:
			p("engine alone", "a stream's connection is closed: the request runs on")
		}
	}
	if l := r.Load; l.Streams > 0 {
		waiting := "and one more had to wait"
		switch {
		case !l.Saturated:
			waiting = "and none had to wait: the engine was not full"
		case l.Waiting > 1:
			waiting = fmt.Sprintf("and %d had to wait", l.Waiting)
		}
		p("load", "%d streams ran, %s: %s", l.Streams, waiting, l.Full)
	}
	for i, e := range r.Evictions {
		who := fmt.Sprintf("a stream after %d tokens", e.Tokens)
		if !e.Streamed {
			who = "a request that is not streamed"
		}
		switch {
		case e.Waiting > 0:
			who += ", while a request waits"
		case i == 1:
			who += ", while none waits"
		}
		p(fmt.Sprintf("eviction %d", i+1), "%s", who)
		p("  client", "%s", e.Text)
		running := fell(e.Before.Running, e.After.Running, e.RunningMS, count)
		if e.StartedMS != nil && e.RunningMS == nil {
			running += ", as the waiting request took the place"
		}
		p("  running", "%s", running)
		if e.Before.KV != nil {
			to := e.KV
			if to == nil {
				to = e.After.KV
			}
			p("  KV cache", "%s", fell(e.Before.KV, to, e.KVMS, percent))
		}
		switch {
		case e.StartedMS != nil:
			p("  waiting", "its first token after %s", ms(e.StartedMS))
		case e.Waiting > 0:
			p("  waiting", "still waits")
		}
	}
	if r.After.Running != nil {
		p("afterwards", "%s", r.After)
	}
	for _, n := range r.Notes {
		p("note", "%s", n)
	}
	_, err := io.WriteString(out, w.String())
	return err
}

func (g Gauges) String() string {
	value := func(f *float64) float64 {
		if f == nil {
			return math.NaN()
		}
		return *f
	}
	return sample{running: value(g.Running), waiting: value(g.Waiting), kv: value(g.KV)}.String()
}

// fell says what became of a gauge.
func fell(before, after, at *float64, text func(float64) string) string {
	switch {
	case before == nil || after == nil:
		return "not known"
	case at != nil:
		return fmt.Sprintf("%s -> %s after %s", text(*before), text(*after), ms(at))
	default:
		return fmt.Sprintf("%s -> %s", text(*before), text(*after))
	}
}

// ms writes milliseconds, with a decimal where that says something.
func ms(f *float64) string {
	switch {
	case f == nil:
		return "?"
	case *f < 10:
		return fmt.Sprintf("%.1f ms", *f)
	}
	return fmt.Sprintf("%.0f ms", *f)
}
