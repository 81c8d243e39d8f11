package e2e_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

// A stage is a world behind an Envoy that is configured for one scene, without the
// fake.
type stage struct {
	*world
	envoy   *envoy.Envoy
	version string
	server  *grpc.Server

	// What a scene may change before the Envoy starts. The first ExtProc and the
	// endpoint are the world's.
	config  envoy.Config
	backend http.Handler // the world
}

// raise returns a stage with an Envoy at bin, until the end of the test.
func raise(t *testing.T, bin string, m mode, change func(*stage)) *stage {
	t.Helper()
	extProc, upstream := listen(t), listen(t)
	s := &stage{world: actor(t, m), version: versionOf(t, bin)}
	s.server = s.serve(extProc)
	s.backend = s.world
	s.config = envoy.Config{
		ExtProc:      []envoy.ExtProc{s.filter(extProc)},
		Upstream:     envoy.Upstream{Endpoints: []string{upstream.Addr().String()}},
		DelayedClose: new(100 * time.Millisecond),
	}
	if change != nil {
		change(s)
	}
	hs := &http.Server{Handler: s.backend, Protocols: new(http.Protocols)}
	hs.Protocols.SetHTTP1(true)
	hs.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { hs.Serve(upstream) })
	t.Cleanup(func() {
		hs.Close()
		wg.Wait()
	})
	var err error
	if s.envoy, err = envoy.Start(t.Context(), bin, s.config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.envoy.Close(); err != nil {
			t.Error(err)
		}
	})
	s.paths = []*path{s.way(false), s.way(true)}
	t.Cleanup(s.leftovers)
	return s
}

// actor returns a world that has no paths: an ext_proc server and what it knows.
func actor(t *testing.T, m mode) *world {
	return &world{TB: t, mode: m, ev: evictor.New(), calls: make(map[string]*call), handles: make(map[*abort.Handle]*call)}
}

// serve runs the world's ext_proc server on l until the end of the test.
func (w *world) serve(l net.Listener) *grpc.Server {
	gs, _ := wrapped(w.process, extproc.WithObserver(w.observe), extproc.WithRegistry(&w.registry))
	var wg sync.WaitGroup
	wg.Go(func() { gs.Serve(l) })
	w.Cleanup(func() {
		gs.Stop()
		wg.Wait()
	})
	return gs
}

// replaceServer stops the ext_proc server and runs another on its port.
func (s *stage) replaceServer(stop func(*grpc.Server)) {
	s.Helper()
	stop(s.server)
	var l net.Listener
	var err error
	if !eventually(func() bool {
		l, err = net.Listen("tcp", s.config.ExtProc[0].Address)
		return err == nil
	}) {
		s.Fatal(err)
	}
	s.server = s.serve(l)
}

// filter returns the filter of the world's ext_proc server.
func (w *world) filter(l net.Listener) envoy.ExtProc {
	return envoy.ExtProc{Address: l.Addr().String(), Mode: envoy.ProcessingMode(w.mode), MessageTimeout: messageTimeout}
}

// way returns the path of HTTP/1.1, or of HTTP/2.
func (s *stage) way(h2 bool) *path {
	tr := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	tr.Protocols.SetHTTP1(!h2)
	tr.Protocols.SetUnencryptedHTTP2(h2)
	s.Cleanup(tr.CloseIdleConnections)
	p := &path{name: "h1", envoy: s.version, client: &http.Client{Transport: tr}, url: s.envoy.URL()}
	p.reset = func(err error) bool { return err == io.ErrUnexpectedEOF }
	if h2 {
		p.name = "h2"
		p.reset = func(err error) bool { return err != nil && strings.HasSuffix(err.Error(), "; received from peer") } // with any code
	}
	p.log = func() (lines []line, err error) {
		entries, err := s.envoy.AccessLog()
		for _, e := range entries {
			lines = append(lines, line{Path: e.Path, Code: e.Code, Details: e.Details})
		}
		return lines, err
	}
	return p
}

// stat waits until a counter or gauge of the Envoy has a value.
func (s *stage) stat(name string, want uint64) error {
	var got uint64
	var err error
	if !eventually(func() bool {
		var stats map[string]uint64
		stats, err = s.envoy.Stats(s.Context())
		got = stats[name]
		return err != nil || got == want
	}) {
		err = fmt.Errorf("%s is %d, want %d", name, got, want)
	}
	return err
}

// expect has the world know a call that it does not start.
func (w *world) expect(c *call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[c.uri] = c
}

// evictAt evicts a call when it has all marks.
func (w *world) evictAt(c *call, at ...mark) error {
	if err := c.await(at...); err != nil {
		return err
	}
	_, err := w.evict(c)
	return err
}

// evicted starts a call, evicts it when it has all marks, and returns its end.
func (s *stage) evicted(c *call, at ...mark) string {
	s.start(s.Context(), c)
	if err := s.evictAt(c, at...); err != nil {
		return err.Error()
	}
	return s.end(c)
}

// end waits until nothing runs of a call any more. It returns in words what the client
// got, how the backend ended, status and details in the access log, the outcome and
// the effect.
func (s *stage) end(c *call) string { return s.endFor(c, (*call).got) }

// endFor is end with other words for what the client got.
func (s *stage) endFor(c *call, client func(*call) string) string {
	outcome := s.outcome(c, client) // has waited for the event
	return words(outcome, c.event.Effect)
}

// outcome is endFor without the effect, of which the library is not sure when a machine
// stands still for a second.
func (s *stage) outcome(c *call, client func(*call) string) string {
	request := s.request(c, client) // has waited for the event
	return words(request, c.event.Outcome)
}

// request waits until nothing runs of a call any more and returns the first words of
// its end.
func (s *stage) request(c *call, client func(*call) string) string {
	marks := []mark{done, hungUp, observed}
	if c.isSet(called) {
		marks = append(marks, backendDone)
	}
	if err := c.await(marks...); err != nil {
		return err.Error()
	}
	l, err := s.line(c)
	if err != nil {
		return err.Error()
	}
	return words(client(c), c.upstream(), fmt.Sprintf("%d_%s", l.Code, l.Details))
}

// got is client with words for what is not the library's answer, or not as it was sent.
func (c *call) got() string {
	r := &c.reply
	if r.status == http.StatusOK || r.err != nil {
		return c.client()
	}
	framing := ""
	if r.length < 0 {
		framing = "chunked"
		r.length = int64(len(r.body))
	}
	if client := c.client(); client == "429" {
		return words(client, framing)
	}
	body := strings.ReplaceAll(r.body, errorObject, "error-object")
	return words(r.status, body, r.header.Get("Content-Type"), r.header.Get("X-Evicted-Reason"), framing)
}

// words joins what fmt.Sprint makes of each, if anything.
func words(all ...any) string {
	var s []string
	for _, a := range all {
		if w := strings.Join(strings.Fields(fmt.Sprint(a)), "_"); w != "" {
			s = append(s, w)
		}
	}
	return strings.Join(s, ",")
}

// names joins the parts of a row's name.
func names(parts ...any) string { return strings.ReplaceAll(words(parts...), ",", "/") }

// A sheet takes the cells of rows that run side by side. The zero sheet is empty.
type sheet struct {
	wg    sync.WaitGroup
	cells []*cell // each written by its row's goroutine
}

// row runs a row; the cell has what f returns.
func (s *sheet) row(name string, f func() string) {
	c := &cell{row: name}
	s.cells = append(s.cells, c)
	s.wg.Go(func() { c.got = f() })
}

// all waits for the rows and returns their cells.
func (s *sheet) all() (cells []cell) {
	s.wg.Wait()
	for _, c := range s.cells {
		cells = append(cells, *c)
	}
	return cells
}

// tally sorts words and counts those that are equal.
func tally(each []string) string {
	slices.Sort(each)
	var s []string
	for len(each) > 0 {
		n := 1
		for n < len(each) && each[n] == each[0] {
			n++
		}
		s = append(s, fmt.Sprintf("%d_%s", n, each[0]))
		each = each[n:]
	}
	return strings.Join(s, "+")
}

// moments are when most scenes evict.
var moments = []struct {
	name string
	backend
	at mark
}{
	{"waiting", waits, wrote},
	{"mid-body", begins, hasEnough},
}

// sceneCall returns a call of which the client has enough after three events.
func sceneCall(p *path, b backend) *call {
	c := newCall(p, b)
	c.enough = len(events(3))
	return c
}
