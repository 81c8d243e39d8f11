package openai_test

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A parser is a client that takes nothing that is no event stream, from a path of its
// own through HTTP/1.1 or HTTP/2.
type parser struct {
	name   string
	client *http.Client
}

func newParser(t *testing.T, h2 bool) parser {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!h2)
	tr.Protocols.SetUnencryptedHTTP2(h2)
	t.Cleanup(tr.CloseIdleConnections)
	return parser{map[bool]string{false: "h1", true: "h2"}[h2], &http.Client{Transport: tr, Timeout: patience}}
}

// A stream is what a parser has seen of an answer.
type stream struct {
	status  int
	refusal string   // the body, if the status is not 200
	data    []string // of each event
	cut     bool     // there was a part of another one
	err     error    // why the end is not normal
}

// ask asks for an answer. While it comes, each is told how many events there were.
func (p parser) ask(g *gateway, name string, pl plan, each func(events int)) (s stream) {
	resp, err := p.client.Post(g.base(name, pl)+"/chat/completions", "application/json", strings.NewReader(`{"model":"model"}`))
	if err != nil {
		return stream{err: err}
	}
	defer resp.Body.Close()
	s.status = resp.StatusCode
	if s.status != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		return stream{status: s.status, refusal: string(b), err: err}
	}
	var data []string // of the event that comes
	for r := bufio.NewReader(resp.Body); ; {
		line, err := r.ReadString('\n')
		if err != nil {
			s.cut = line != "" || data != nil
			if err != io.EOF {
				s.err = err
			}
			return s
		}
		line = strings.TrimSuffix(line, "\n")
		field, value, colon := strings.Cut(line, ":")
		switch {
		case line == "" && data != nil:
			s.data, data = append(s.data, strings.Join(data, "\n")), nil
			each(len(s.data))
		case line == "", field == "" && colon: // a comment
		case field == "data":
			data = append(data, strings.TrimPrefix(value, " "))
		default:
			s.err = fmt.Errorf("no line of an event stream: %q", line)
			return s
		}
	}
}

const errorObject = `{"error":{"message":"` + message + `","type":"rate_limit_error","param":null,"code":"request_evicted"}}`

// ending returns how the answer ended, and how many of its events there were. It fails
// unless they are the answer's, in order, and an error event, if any, is the last.
func (s stream) ending() (e ending, events int, err error) {
	all, got := answer(), s.data
	evicted := len(got) > 0 && got[len(got)-1] == errorObject
	if evicted {
		got = got[:len(got)-1]
	}
	n := len(got)
	switch {
	case s.status == http.StatusTooManyRequests && s.refusal == errorObject && s.err == nil:
		return status, 0, nil
	case s.status != http.StatusOK || n > len(all) || !slices.Equal(got, all[:n]):
	case evicted && !s.cut && isReset(s.err):
		return errorEvent, n, nil
	case evicted && !s.cut && s.err == nil:
		return lastEvent, n, nil
	case !evicted && isReset(s.err):
		return reset, n, nil
	case !evicted && !s.cut && s.err == nil && n == len(all):
		return whole, n, nil
	}
	return "", n, fmt.Errorf("no way for an answer to end: %+v", s)
}

// isReset reports whether reading a body failed because the connection was closed
// before its end, or with an RST_STREAM.
func isReset(err error) bool {
	return err == io.ErrUnexpectedEOF || err != nil && strings.HasSuffix(err.Error(), "received from peer")
}

// run asks for an answer in each setting with each plan.
func (p parser) run(t *testing.T, gs []*gateway) {
	for _, g := range gs {
		for _, pl := range plans {
			s := p.ask(g, p.name, pl, func(events int) {
				if events == len(first) && pl != untouched && !g.evict(p.name, pl) {
					t.Errorf("%s, %s: not evicted", g.name, pl)
				}
			})
			want := map[plan]int{midAnswer: len(first), midEvent: len(first), untouched: len(answer())}[pl]
			e, n, err := s.ending()
			if err != nil || e != endings[g.name][pl] || n != want || s.cut != (pl == midEvent) {
				t.Errorf("%s, %s: ending %q behind %d events, %v; want %q behind %d: %+v", g.name, pl, e, n, err, endings[g.name][pl], want, s)
			}
		}
	}
}

// random evicts at random times. No answer ends in an odd way: a normal end comes
// behind [DONE], or behind an error event, and [DONE] comes behind a whole answer.
func (p parser) random(t *testing.T, g *gateway) {
	var mu sync.Mutex // guards seen
	seen := make(map[ending]int)
	one := func(name string) {
		var evictor sync.WaitGroup
		defer evictor.Wait()
		evicted := make(chan bool, 1)
		when := rand.IntN(len(answer()) + 1)
		evict := func(events int) {
			if events == when {
				evictor.Go(func() {
					time.Sleep(rand.N(4 * time.Millisecond))
					evicted <- g.evict(name, random)
				})
			}
		}
		evict(0)
		s := p.ask(g, name, random, evict)
		e, n, err := s.ending()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		evictor.Wait()
		select {
		case hit := <-evicted:
			// Nobody sees the end of a response in NONE: there an eviction may come too late.
			if hit == (e == whole) && !(hit && g.mode.ResponseBody == "") {
				t.Errorf("%s: evicted %v, ending %q behind %d events", name, hit, e, n)
			}
		default: // the answer ended before it was to be
		}
		mu.Lock()
		seen[e]++
		mu.Unlock()
	}
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := 0; i < 25 && !t.Failed(); i++ {
				one(fmt.Sprintf("%s-%d-%d", p.name, c, i))
			}
		})
	}
	clients.Wait()
	t.Log(seen)
	for _, e := range []ending{whole, endings[g.name][midAnswer]} {
		if seen[e] == 0 {
			t.Errorf("never %q: %v", e, slices.Sorted(maps.Keys(seen)))
		}
	}
}
