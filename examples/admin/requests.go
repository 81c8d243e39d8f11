package admin

import (
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/extevict/extevict/abort"
)

// A List is the answer of /requests.
type List struct {
	Total    int       `json:"total"`    // how many there are
	Requests []Request `json:"requests"` // the first of them
}

// A Result is the answer of /abort, /drain and /evict.
type Result struct {
	Ended     int       `json:"ended"`               // requests that this call has ended
	Remaining *int      `json:"remaining,omitempty"` // /drain: tracked at the endpoint afterwards
	Requests  []Request `json:"requests,omitempty"`  // /evict: those that it has, or would have, ended
	Error     string    `json:"error,omitempty"`     // of Aborters, or that time was up
}

// A Request is one in flight. Its texts are the client's or the server's own, at most
// 256 bytes of each, and hold U+FFFD for what is no UTF-8.
type Request struct {
	ID        string   `json:"id"`        // as the registry knows it: may be forged, repeated or empty
	Query     string   `json:"query"`     // what /abort takes for exactly this id; "" if there is none
	Key       string   `json:"key"`       // the engine's own name for it
	Priority  int      `json:"priority"`  // higher matters more
	Tokens    int64    `json:"tokens"`    // what it holds, on all its endpoints
	Endpoints []string `json:"endpoints"` // where it runs; empty if it isn't tracked
	Evictions int      `json:"evictions"` // how often this work was evicted before
	Phase     string   `json:"phase"`     // unknown, waiting, held, streaming
	AgeMS     int64    `json:"age_ms"`
	Chunks    int64    `json:"chunks"` // of the response's body, as far as the server sees it
	Bytes     int64    `json:"bytes"`
}

// describe returns what is known of h, which carries id in the registry.
func describe(id string, h *abort.Handle) Request {
	p := h.Progress()
	r := Request{
		ID: cut(id, maxText), Phase: p.Phase.String(), AgeMS: time.Since(p.Start).Milliseconds(), Chunks: p.Chunks, Bytes: p.Bytes,
		Endpoints: []string{},
	}
	if id != "" {
		r.Query = url.Values{"id": {id}}.Encode()
	}
	for i, leg := range h.Requests() {
		if i == 0 {
			r.Key, r.Priority, r.Evictions = cut(leg.Key, maxText), leg.Priority, leg.Evictions
			if id == "" {
				r.ID = cut(leg.ID, maxText)
			}
		}
		r.Tokens += leg.Tokens
		if leg.Endpoint != "" {
			r.Endpoints = append(r.Endpoints, cut(leg.Endpoint, maxText))
		}
	}
	return r
}

// ids returns the requests in the registry, with an id of each.
func (x *call) ids() map[*abort.Handle]string {
	ids := make(map[*abort.Handle]string)
	for id, h := range x.Registry.All() {
		ids[h] = id
	}
	return ids
}

// inFlight returns all requests: those that are tracked in the order of eviction, then
// the others, the newest first.
func (x *call) inFlight() []Request {
	rows := []Request{}
	ids := x.ids()
	for h := range x.Evictor.All() {
		rows = append(rows, describe(ids[h], h))
		delete(ids, h)
	}
	tracked := len(rows)
	for h, id := range ids {
		if h.Outcome() == abort.Pending {
			rows = append(rows, describe(id, h))
		}
	}
	slices.SortStableFunc(rows[tracked:], func(a, b Request) int { return int(a.AgeMS - b.AgeMS) })
	return rows
}

// at returns the requests at an endpoint, or all if that is "".
func at(rows []Request, endpoint string) []Request {
	kept := []Request{}
	for _, r := range rows {
		if endpoint == "" || slices.Contains(r.Endpoints, endpoint) {
			kept = append(kept, r)
		}
	}
	return kept
}

const maxText = 256 // bytes of a text in an answer

// cut returns the first n bytes of s, less what would split a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// printable returns s for a log: short, and on one line whatever the log's format is.
func printable(s string) string {
	s = cut(s, maxText)
	odd := func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }
	if strings.ContainsFunc(s, odd) {
		return strconv.QuoteToASCII(s)
	}
	return s
}
