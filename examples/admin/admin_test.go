package admin_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/admin"
)

// A world is an endpoint and the requests behind it.
type world struct {
	t        *testing.T
	registry abort.Registry
	evictor  *evictor.Evictor
	log      bytes.Buffer
	handler  http.Handler
}

func newWorld(t *testing.T, opts ...evictor.Option) *world {
	w := &world{t: t, evictor: evictor.New(opts...)}
	w.handler = admin.Handler(admin.Config{
		Registry: &w.registry, Evictor: w.evictor, Hosts: []string{"picker.example"},
		Log: slog.New(slog.NewTextHandler(&w.log, nil)),
	})
	return w
}

// add has a request in flight under an id, tracked if there is a description.
func (w *world) add(id string, reqs ...abort.Request) *abort.Owner {
	own, ctx := abort.New(context.Background())
	w.t.Cleanup(own.Close)
	w.registry.Add(id, own.Handle())
	if len(reqs) > 0 {
		w.evictor.TrackRequests(ctx, reqs...)
	}
	return own
}

// do calls the endpoint and returns status and body.
func (w *world) do(method, target string, form url.Values) (int, string) {
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}
	r := httptest.NewRequest(method, "http://127.0.0.1:9003"+target, body)
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	return w.serve(r)
}

func (w *world) serve(r *http.Request) (int, string) {
	rec := httptest.NewRecorder()
	w.handler.ServeHTTP(rec, r)
	return rec.Code, rec.Body.String()
}

// call is do for calls that succeed.
func call[T any](w *world, method, target string, form url.Values) (v T) {
	w.t.Helper()
	status, body := w.do(method, target, form)
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil || status != http.StatusOK {
		w.t.Fatalf("%s %s: status %d, error %v, body %.300s", method, target, status, err, body)
	}
	return v
}

// reason returns why a request was aborted, or "" if it was not.
func reason(own *abort.Owner) abort.Reason {
	if e, ok := errors.AsType[*abort.Error](own.Handle().Err()); ok {
		return e.Reason
	}
	return ""
}

func reasons(owns ...*abort.Owner) (rs []abort.Reason) {
	for _, own := range owns {
		rs = append(rs, reason(own))
	}
	return rs
}

func TestList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.add("queued-1")
		time.Sleep(time.Second)
		a := w.add("a", abort.Request{ID: "a", Key: "cmpl-a", Priority: 1, Tokens: 10, Endpoint: "e1", Evictions: 2}, abort.Request{Tokens: 5, Endpoint: "e2"})
		a.Advance(abort.Streaming)
		a.Count(3, 300)
		time.Sleep(time.Second)
		w.add("b", abort.Request{Priority: -1, Endpoint: "e1"})
		time.Sleep(time.Second)
		w.add("b", abort.Request{Priority: -1, Endpoint: "e2"})
		w.add("", abort.Request{ID: "anonymous", Priority: 5})
		w.add("queued-2")
		w.add("over", abort.Request{}).Close()

		b := admin.Request{ID: "b", Query: "id=b", Priority: -1, Phase: "waiting"}
		b1, b2 := b, b
		b1.Endpoints, b1.AgeMS = []string{"e1"}, 1000
		b2.Endpoints = []string{"e2"}
		first := admin.Request{
			ID: "a", Query: "id=a", Key: "cmpl-a", Priority: 1, Tokens: 15, Endpoints: []string{"e1", "e2"}, Evictions: 2,
			Phase: "streaming", AgeMS: 2000, Chunks: 3, Bytes: 300,
		}
		anonymous := admin.Request{ID: "anonymous", Priority: 5, Phase: "waiting", Endpoints: []string{}}
		queued1 := admin.Request{ID: "queued-1", Query: "id=queued-1", Phase: "waiting", AgeMS: 3000, Endpoints: []string{}}
		queued2 := admin.Request{ID: "queued-2", Query: "id=queued-2", Phase: "waiting", Endpoints: []string{}}
		for target, want := range map[string]admin.List{
			"/requests":                   {Total: 6, Requests: []admin.Request{b2, b1, first, anonymous, queued2, queued1}},
			"/requests?limit=1":           {Total: 6, Requests: []admin.Request{b2}},
			"/requests?id=b":              {Total: 2, Requests: []admin.Request{b2, b1}}, // the newest first
			"/requests?id=b&endpoint=e1":  {Total: 1, Requests: []admin.Request{b1}},
			"/requests?id=":               {Requests: []admin.Request{}},
			"/requests?endpoint=e2":       {Total: 2, Requests: []admin.Request{b2, first}},
			"/requests?endpoint=nowhere":  {Requests: []admin.Request{}},
			"/requests?id=over":           {Requests: []admin.Request{}},
			"/requests?limit=1&endpoint=": {Total: 6, Requests: []admin.Request{b2}},
		} {
			if d := cmp.Diff(want, call[admin.List](w, "GET", target, nil)); d != "" {
				t.Errorf("%s (-want +got):\n%s", target, d)
			}
		}
	})
}

func TestListIsBounded(t *testing.T) {
	w := newWorld(t)
	for i := range 1200 {
		w.add(fmt.Sprint(i), abort.Request{Endpoint: "e"})
	}
	for limit, want := range map[string]int{"": 100, "?limit=7": 7, "?limit=1000": 1000} {
		if l := call[admin.List](w, "GET", "/requests"+limit, nil); len(l.Requests) != want || l.Total != 1200 {
			t.Errorf("%q: %d of %d requests, want %d of 1200", limit, len(l.Requests), l.Total, want)
		}
	}
}

func TestAbort(t *testing.T) {
	w := newWorld(t)
	tracked, queued, other := w.add("x", abort.Request{Priority: math.MaxInt}), w.add("x"), w.add("y", abort.Request{})
	for _, c := range []struct {
		id    string
		ended int
	}{{"z", 0}, {"x", 2}, {"x", 0}} {
		if d := cmp.Diff(admin.Result{Ended: c.ended}, call[admin.Result](w, "POST", "/abort", url.Values{"id": {c.id}})); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.id, d)
		}
	}
	if d := cmp.Diff([]abort.Reason{abort.Canceled, abort.Canceled, ""}, reasons(tracked, queued, other)); d != "" {
		t.Errorf("reasons (-want +got):\n%s", d)
	}
	call[admin.Result](w, "POST", "/abort?id=y", nil) // a query will do
	if r := reason(other); r != abort.Canceled {
		t.Errorf("with a query: reason %q", r)
	}
	if n := strings.Count(w.log.String(), "\n"); n != 2 { // what ended nothing is not told
		t.Errorf("log:\n%s", &w.log)
	}
}

// TestAborter checks that an abort by id asks the evictor's Aborter as an eviction does.
func TestAborter(t *testing.T) {
	var asked []string
	fails := map[string]bool{"bad": true}
	w := newWorld(t, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, r abort.Reason) error {
		key := h.Requests()[0].Key
		asked = append(asked, fmt.Sprintf("%s %v", key, r))
		if fails[key] {
			return errors.New("the engine says <no>\n" + strings.Repeat("no ", 1000))
		}
		return nil
	})))
	good, bad := w.add("x", abort.Request{Key: "good"}), w.add("y", abort.Request{Key: "bad"})
	call[admin.Result](w, "POST", "/abort", url.Values{"id": {"x"}})
	status, body := w.do("POST", "/abort", url.Values{"id": {"y"}})
	if status != http.StatusBadGateway || !strings.Contains(body, `"ended":0`) || !strings.Contains(body, "the engine says") || len(body) > 1000 {
		t.Errorf("an Aborter that fails: status %d, body %s", status, body)
	}
	if d := cmp.Diff([]abort.Reason{abort.Canceled, ""}, reasons(good, bad)); d != "" {
		t.Errorf("reasons (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"good canceled", "bad canceled"}, asked); d != "" {
		t.Errorf("asked (-want +got):\n%s", d)
	}
	if n := strings.Count(w.log.String(), "\n"); n != 2 || w.log.Len() > 1500 {
		t.Errorf("log:\n%s", &w.log)
	}
}

// TestAborterThatHangs checks that a call ends.
func TestAborterThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, evictor.WithAborter(abort.AborterFunc(func(ctx context.Context, _ *abort.Handle, _ abort.Reason) error {
			<-ctx.Done()
			return ctx.Err()
		})))
		own := w.add("x", abort.Request{Endpoint: "e"})
		start := time.Now()
		status, body := w.do("POST", "/drain", url.Values{"endpoint": {"e"}})
		if took := time.Since(start); status != http.StatusGatewayTimeout || took != 10*time.Second || reason(own) != "" {
			t.Errorf("status %d after %v, reason %q, body %s", status, took, reason(own), body)
		}
	})
}

func TestDrain(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.add("a", abort.Request{Priority: 9, Endpoint: "e1"}), w.add("b", abort.Request{Endpoint: "e2"}, abort.Request{Endpoint: "e1"}), w.add("c", abort.Request{Endpoint: "e2"})
	want := admin.Result{Ended: 2, Remaining: new(0)}
	if d := cmp.Diff(want, call[admin.Result](w, "POST", "/drain", url.Values{"endpoint": {"e1"}})); d != "" {
		t.Errorf("result (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]abort.Reason{abort.Draining, abort.Draining, ""}, reasons(a, b, c)); d != "" {
		t.Errorf("reasons (-want +got):\n%s", d)
	}
	for i := range 1003 {
		w.add(fmt.Sprint(i), abort.Request{Endpoint: "e3"})
	}
	for _, want := range []admin.Result{{Ended: 1000, Remaining: new(3)}, {Ended: 3, Remaining: new(0)}} {
		if d := cmp.Diff(want, call[admin.Result](w, "POST", "/drain?endpoint=e3", nil)); d != "" {
			t.Errorf("many (-want +got):\n%s", d)
		}
	}
}

func TestEvict(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.add("a", abort.Request{Endpoint: "e1"}), w.add("b", abort.Request{Priority: -1, Endpoint: "e2"}), w.add("c", abort.Request{Priority: 1, Endpoint: "e1"})
	for _, step := range []struct {
		form    string
		ended   int
		victims []string
		reasons []abort.Reason
	}{
		{"n=9&below=-1", 0, nil, []abort.Reason{"", "", ""}},
		{"n=1&below=1&dry_run=true", 0, []string{"b"}, []abort.Reason{"", "", ""}},
		{"n=1&below=1&endpoint=e1&dry_run=false", 1, []string{"a"}, []abort.Reason{abort.Preempted, "", ""}},
		{"n=1000&below=1", 1, []string{"b"}, []abort.Reason{abort.Preempted, abort.Preempted, ""}},
	} {
		form, err := url.ParseQuery(step.form)
		if err != nil {
			t.Fatal(err)
		}
		r := call[admin.Result](w, "POST", "/evict", form)
		var victims []string
		for _, v := range r.Requests {
			victims = append(victims, v.ID)
		}
		if d := cmp.Diff([]any{step.ended, step.victims, step.reasons}, []any{r.Ended, victims, reasons(a, b, c)}); d != "" {
			t.Errorf("%s (-want +got):\n%s", step.form, d)
		}
	}
}

// TestRefused checks calls that must not end anything.
func TestRefused(t *testing.T) {
	w := newWorld(t)
	own := w.add("x", abort.Request{Priority: -1, Endpoint: "e"})
	long := strings.Repeat("x", 5000)
	for _, c := range []struct {
		method, target, body string
		header               string // name: value
		status               int
	}{
		{"POST", "/abort", "", "", 400},
		{"POST", "/abort?id=", "", "", 400},
		{"POST", "/abort", "ID=x", "", 400},
		{"POST", "/abort?id=x", "id=y", "", 400},
		{"POST", "/abort?id=x&id=y", "", "", 400},
		{"POST", "/abort?id=x&why=no", "", "", 400},
		{"POST", "/abort?id=" + long, "", "", 400},
		{"POST", "/abort?id=x;y", "", "", 400},
		{"POST", "/abort?id=%zz", "", "", 400},
		{"POST", "/abort?id=x&" + strings.Repeat("a", 20000), "", "", 414},
		{"POST", "/abort", "id=x&y=" + strings.Repeat("a", 20000), "", 413},
		{"POST", "/abort", `{"id":"x"}`, "Content-Type: application/json", 400},
		{"GET", "/abort?id=x", "", "", 405},
		{"HEAD", "/abort?id=x", "", "", 405},
		{"PUT", "/abort?id=x", "", "", 405},
		{"DELETE", "/requests?id=x", "", "", 405},
		{"POST", "/requests", "id=x", "", 405},
		{"GET", "/drain?endpoint=e", "", "", 405},
		{"GET", "/evict?n=1&below=0", "", "", 405},
		{"GET", "/", "", "", 404},
		{"POST", "/abort/", "id=x", "", 404},
		{"GET", "/requests?limit=0", "", "", 400},
		{"GET", "/requests?limit=1001", "", "", 400},
		{"GET", "/requests?limit=many", "", "", 400},
		{"POST", "/drain", "", "", 400},
		{"POST", "/drain?endpoint=", "", "", 400},
		{"POST", "/drain?endpont=e", "", "", 400},
		{"POST", "/evict", "", "", 400},
		{"POST", "/evict", "n=1", "", 400},
		{"POST", "/evict", "below=0", "", 400},
		{"POST", "/evict", "n=0&below=0", "", 400},
		{"POST", "/evict", "n=1001&below=0", "", 400},
		{"POST", "/evict", "n=1&below=99999999999999999999", "", 400},
		{"POST", "/evict", "n=1&below=0&endpoint=", "", 400},
		{"POST", "/evict", "n=1&below=0&dry_run=yes", "", 400},
		{"POST", "/abort", "id=x", "Origin: http://evil.example", 403},
		{"POST", "/abort", "id=x", "Origin: null", 403},
		{"POST", "/abort", "id=x", "Sec-Fetch-Site: cross-site", 403},
		{"POST", "/abort", "id=x", "Sec-Fetch-Site: same-site", 403},
		{"POST", "/abort", "id=x", "Host: evil.example", 421},
		{"GET", "/requests", "", "Host: evil.example:9003", 421},
		{"GET", "/requests", "", "Host: localhost.evil.example", 421},
		{"GET", "/requests", "", "Host: 127.0.0.1.evil.example", 421},
	} {
		r := httptest.NewRequest(c.method, "http://127.0.0.1:9003"+c.target, strings.NewReader(c.body))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if name, value, ok := strings.Cut(c.header, ": "); ok {
			if r.Header.Set(name, value); name == "Host" {
				r.Host = value
			}
		}
		if status, body := w.serve(r); status != c.status {
			t.Errorf("%s %.60s %.60q %s: status %d, want %d, body %.200s", c.method, c.target, c.body, c.header, status, c.status, body)
		}
	}
	if r := reason(own); r != "" || w.log.Len() > 0 {
		t.Errorf("it was aborted: %q, log %s", r, &w.log)
	}
	for _, host := range []string{"localhost", "LOCALHOST:9003", "[::1]:9003", "::1", "10.0.0.7:80", "picker.example", "Picker.Example:9003"} {
		r := httptest.NewRequest("GET", "http://127.0.0.1:9003/requests", nil)
		r.Host = host
		if status, body := w.serve(r); status != 200 {
			t.Errorf("host %s: status %d, body %s", host, status, body)
		}
	}
}

// FuzzID checks that no id breaks JSON or log, and that each but the empty one can be
// aborted by what the list shows, alone.
func FuzzID(f *testing.F) {
	for _, id := range []string{
		"plain", "", " ", "a b", "a&id=b", "a=b;c", "é", "日本", "\x00", "a\r\nlevel=ERROR msg=forged", "\x1b[2J", "\xff\xfe", "a\xc3",
		`"}]}`, `\`, "</script><script>alert(1)</script>", "\u2028\u202e", "%41", "+", "#", "\ufffd",
		strings.Repeat("x", 64<<10), strings.Repeat("é", 300), strings.Repeat("\xff", 300), strings.Repeat("\n", 256),
	} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		w := newWorld(t)
		others := []*abort.Owner{w.add("another", abort.Request{}), w.add("\ufffd-"+id, abort.Request{}), w.add("", abort.Request{})}
		own := w.add(id, abort.Request{ID: id, Key: id, Endpoint: id, Priority: -1})

		_, body := w.do("GET", "/requests", nil)
		if strings.ContainsFunc(strings.TrimSuffix(body, "\n"), func(r rune) bool { return r < ' ' || r == '<' || r == '>' }) || !utf8.ValidString(body) || len(body) > 16<<10 {
			t.Errorf("the list has raw bytes, or %d of them: %.300q", len(body), body)
		}
		row := call[admin.List](w, "GET", "/requests", nil).Requests[0] // the lowest priority
		if len(row.ID) > 3*256 || row.Priority != -1 {
			t.Errorf("row %.500v", row)
		}
		if id == "" {
			if row.Query != "" {
				t.Errorf("the empty id can be queried: %q", row.Query)
			}
			return
		}
		form, err := url.ParseQuery(row.Query)
		if err != nil {
			t.Fatal(err)
		}
		if r := call[admin.Result](w, "POST", "/abort", form); r.Ended != 1 || reason(own) != abort.Canceled {
			t.Errorf("abort: %d ended, this one for %q", r.Ended, reason(own))
		}
		if d := cmp.Diff([]abort.Reason{"", "", ""}, reasons(others...)); d != "" {
			t.Errorf("others (-want +got):\n%s", d)
		}
		log := w.log.String()
		if strings.ContainsFunc(strings.TrimSuffix(log, "\n"), func(r rune) bool { return r < ' ' || r > '~' }) || len(log) > 4<<10 {
			t.Errorf("the log has raw bytes, or %d of them: %.300q", len(log), log)
		}
	})
}

// rawLog is a slog.Handler that quotes nothing.
type rawLog struct {
	slog.Handler
	b *bytes.Buffer
}

func (l rawLog) Enabled(context.Context, slog.Level) bool { return true }

func (l rawLog) Handle(_ context.Context, r slog.Record) error {
	l.b.WriteString(r.Message)
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(l.b, " %s=%s", a.Key, a.Value)
		return true
	})
	return l.b.WriteByte('\n')
}

// TestRawLog checks that ids are safe in a log that doesn't care.
func TestRawLog(t *testing.T) {
	var log bytes.Buffer
	var registry abort.Registry
	h := admin.Handler(admin.Config{Registry: &registry, Evictor: evictor.New(), Log: slog.New(rawLog{b: &log})})
	own, _ := abort.New(t.Context())
	defer own.Close()
	registry.Add("a\nadmin: drain\x1b[2J\xff", own.Handle())
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "http://localhost/abort?id=a%0Aadmin:+drain%1B[2J%FF", nil))
	if d := cmp.Diff(`admin: abort id="a\nadmin: drain\x1b[2J\xff" ended=1`+"\n", log.String()); d != "" {
		t.Errorf("log (-want +got):\n%s", d)
	}
}

func TestListen(t *testing.T) {
	for _, c := range []struct {
		address    string
		public, ok bool
	}{
		{"127.0.0.1:0", false, true},
		{"127.9.9.9:0", false, true},
		{"localhost:0", false, true},
		{":0", false, false},
		{"0.0.0.0:0", false, false},
		{"[::]:0", false, false},
		{"192.0.2.1:0", false, false},
		{"127.0.0.1", false, false},
		{"", false, false},
		{":0", true, true},
		{"0.0.0.0:0", true, true},
	} {
		l, err := admin.Listen(c.address, c.public)
		if (err == nil) != c.ok {
			t.Errorf("%q, public %v: error %v", c.address, c.public, err)
		}
		if err == nil {
			l.Close()
		}
	}
}

func TestConfig(t *testing.T) {
	defer func() {
		if r := recover(); r == nil || !strings.HasPrefix(fmt.Sprint(r), "admin: ") {
			t.Errorf("panic %v", r)
		}
	}()
	admin.Handler(admin.Config{Registry: new(abort.Registry)})
}

// TestServer calls the endpoint over a network while requests come and go.
func TestServer(t *testing.T) {
	var registry abort.Registry
	ev := evictor.New()
	l, err := admin.Listen("127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	s := admin.NewServer(admin.Handler(admin.Config{Registry: &registry, Evictor: ev}))
	go s.Serve(l)
	defer s.Close()
	base := "http://" + l.Addr().String()

	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 4 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				own, ctx := abort.New(ctx)
				registry.Add(fmt.Sprint(i%10), own.Handle())
				ev.TrackRequests(ctx, abort.Request{Priority: i % 3, Endpoint: fmt.Sprint(i % 2)})
				time.Sleep(time.Millisecond)
				own.Close()
			}
		})
	}
	for i := range 100 {
		for path, form := range map[string]url.Values{
			"/abort": {"id": {fmt.Sprint(i % 10)}}, "/drain": {"endpoint": {"0"}}, "/evict": {"n": {"1"}, "below": {"2"}}, "/requests": nil,
		} {
			var resp *http.Response
			if form == nil {
				resp, err = http.Get(base + path)
			} else {
				resp, err = http.PostForm(base+path, form)
			}
			if err != nil {
				t.Fatal(err)
			}
			var v map[string]any
			err = json.NewDecoder(resp.Body).Decode(&v)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s, error %v", path, resp.Status, err)
			}
		}
	}
}
